"""The model runner of a CPU: rows on the host, one step at a time."""
