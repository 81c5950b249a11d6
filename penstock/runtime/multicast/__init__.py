"""Multicast trees: which node forwards to which nodes, when that should change, and how it changes while records flow.

Everything here is without threads, clocks and sockets. Time and measurements come in as arguments.
"""
