"""Epochs: a job's state is saved at moments that agree in all tasks, so that the job can start again from the newest
one.
"""
