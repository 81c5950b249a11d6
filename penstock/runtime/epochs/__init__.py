"""Epochs: a job's state saved at moments that agree, so that it can start again from the newest."""
