"""Benchmarks of Penstock beside its peers; see README.md here. `python -m benchmarks --help`."""
