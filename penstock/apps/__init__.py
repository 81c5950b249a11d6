"""Floor 6: the papers' applications as small topologies, and the `penstock` command.

One file an application: a `topology` function that says what flows where, and an `APP` that says what the command
can set about it. `catalog.py` lists them, `cli.py` is the command.
"""
