"""Floor 5: every Ray actor of a job, and `run()`. The only floor that imports ray (with placement/groups.py)."""

from penstock.actors.job import Job
from penstock.actors.run import attach, jobs, resume, run

__all__ = ["Job", "attach", "jobs", "resume", "run"]
