"""What the processes of a job run, and how they and the JobMaster talk: workers, relays, agents of nodes."""
