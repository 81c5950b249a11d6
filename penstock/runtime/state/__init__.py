"""What operators remember between records: keyed state with its changes, aggregates, and timers."""
