"""Floor 6: jobs whose workers are child processes of the program that runs them, without Ray."""
