"""Jobs whose workers are child processes of the program that runs them, without Ray."""
