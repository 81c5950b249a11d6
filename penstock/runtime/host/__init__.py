"""What the process of a JobMaster decides, apart from the epochs: a job from its start to its end, without Ray."""
