"""Transports: carry messages between the workers of a job, through rings of shared memory or inside one process."""
