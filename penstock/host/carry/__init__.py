"""The carriers of the decisions of a job's host: threads, timers, the checkpoint store and the calls to processes."""
