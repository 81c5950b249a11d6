"""Relays: what workers send to all tasks goes once to each other node, along trees (docs/papers.md: W2, W3, W6)."""
