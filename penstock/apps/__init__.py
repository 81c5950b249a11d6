"""Floor 8: the papers' applications as small topologies, and the `penstock` command.

Each application has a file with a function `topology`, which builds the flow, and an `APP`, which says what the command
can set. `catalog.py` lists the applications, `cli.py` is the command.
"""
