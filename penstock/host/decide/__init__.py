"""The deciders of a job: pure, without threads, clocks and sockets, so that a simulated cluster can run it."""
