"""Encoders of whole texts."""
