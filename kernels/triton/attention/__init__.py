"""Paged attention, and the KV cache that it reads."""
