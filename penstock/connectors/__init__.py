"""Connectors: sources and sinks of outside systems, each an extra that is loaded when it is used.

A connector is made of the same interfaces as a source or a sink of a user. Nothing in the house may import a
connector; its names are found by the entry points `penstock.sources` and `penstock.sinks`, as those of other packages.
"""
