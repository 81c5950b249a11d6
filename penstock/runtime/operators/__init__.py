"""Operators: what a user adds to a flow, one file for each family. An operator describes itself, and makes the stage
that runs inside a task.
"""
