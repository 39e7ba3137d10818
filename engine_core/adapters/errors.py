"""Errors of adapters' files."""


class AdapterError(Exception):
    """An adapter cannot be served; the text names the file, the value and the next action."""
