"""What the user says, and what will run: the flow, its graph, and the plan of its tasks."""
