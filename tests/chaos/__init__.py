"""Chaos and soak: real client processes against a real daemon, with faults or for a long time."""
