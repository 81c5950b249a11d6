"""Programs and plans: the flow that a user describes, its graph, and the plan of the tasks that will run."""
