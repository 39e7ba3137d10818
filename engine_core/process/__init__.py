"""The process around the engine: who owns it, who restarts it, how it ended."""
