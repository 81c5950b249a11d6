"""Floor 2: everything that happens inside one process: the graph, operators, batches, channels, tasks, epochs, the
ring. It imports nothing from the floors above, and neither ray nor pyspark.
"""
