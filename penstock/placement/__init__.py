"""Floor 3 plans which worker runs each task. It is pure planning over plain data."""
