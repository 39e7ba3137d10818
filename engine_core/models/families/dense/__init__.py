"""Decoders whose feed-forward is one for every token."""
