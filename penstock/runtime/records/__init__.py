"""Records as Python objects and as bytes: batches, codecs, the one pickler, key groups, and the running of a user's
functions."""
