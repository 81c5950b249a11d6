"""The host of a job and its workers, whatever carries them (Ray, local processes, a simulated cluster): what the host
decides from the start of a job to its end (apart from the epochs), the control sockets, the worker processes and their
reports. Nothing here may import Ray.
"""
