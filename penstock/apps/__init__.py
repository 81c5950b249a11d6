"""Floor 6: the applications of the papers as small topologies, and the `penstock` command."""
