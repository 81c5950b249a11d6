"""Records as Python objects and as bytes: batches, codecs, the only pickler, key groups, and how a user's functions are
run.
"""
