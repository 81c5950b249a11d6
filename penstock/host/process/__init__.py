"""The code that runs in the processes of a job, and their talk with the JobMaster: workers, relays, agents of nodes."""
