"""What operators keep between records: keyed values with their changes, aggregates and timers."""
