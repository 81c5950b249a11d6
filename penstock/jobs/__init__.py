"""Floor 7: the front door. Starts, resumes and finds jobs, on Ray or in child processes, and shows how they go."""
