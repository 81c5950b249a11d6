"""File systems: local folders, object stores, and the locks that let only one job use a directory."""
