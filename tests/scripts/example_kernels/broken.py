"""Cannot be imported."""

raise ImportError("no such thing")
