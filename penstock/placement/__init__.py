"""Floor 3: which worker runs a task: pure planning over plain data."""
