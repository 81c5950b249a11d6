"""Places where files are: local folders, object stores, and the locks that keep a place to one job."""
