"""Floor 4: the operation stream, bursts through Spark (PAPERS rows D1 to D6). The only floor that imports pyspark and
raydp, and only inside functions."""
