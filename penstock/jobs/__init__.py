"""The front door: starts, resumes and finds jobs, on Ray or in child processes, and shows how they go."""
