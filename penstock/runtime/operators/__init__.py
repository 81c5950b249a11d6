"""What a user adds to a flow, one file an operator family: the plain description, and the stage that it becomes
inside a task."""
