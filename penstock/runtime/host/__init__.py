"""What a job's host and its workers do, whatever carries them: what the host decides from a job's start to its end
(apart from the epochs), control sockets, a worker's process and its reports. Nothing here knows Ray."""
