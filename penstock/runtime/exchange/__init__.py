"""How records get from one task to the tasks of the next operator: groupings, messages, channels with credit, and
what is kept for replay."""
