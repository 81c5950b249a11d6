"""Sends records from the tasks of one operator to the tasks of the next: groupings, messages, channels with credit, the
inbox, and the caches for replay.
"""
