"""Floor 4: the operation stream. The only floor that will import pyspark and raydp; nothing is built yet."""
