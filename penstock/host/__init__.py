"""Floor 5: the host of a job, which governs it whatever carries it. It stands above placement and the bridge."""
