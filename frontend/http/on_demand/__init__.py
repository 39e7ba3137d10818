"""Models whose daemons the server starts and stops."""
