"""Floor 6: every Ray actor of a job, and how a program reaches them. The only floor that imports ray (with
placement/groups.py).

It names nothing itself: the process of a worker loads this file before its own module, and needs no other.
"""
