"""The memory of operators between records: keyed state with its changes, aggregates, and timers."""
