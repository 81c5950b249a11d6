"""The code that runs inside one worker: the tasks, the run loop that gives them turns, and the wiring that builds and
connects them.
"""
