"""From options to a running engine; nothing here runs after the start."""
