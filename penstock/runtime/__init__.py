"""Floor 2: what happens inside one process: graph, operators, batches, channels, tasks, the ring.

Imports nothing of the floors above, and neither ray, pyspark nor pyverbs."""
