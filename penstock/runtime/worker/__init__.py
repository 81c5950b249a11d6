"""What runs inside one worker: tasks, the run loop, and the wiring of a plan."""
