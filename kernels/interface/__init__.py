"""The operations that a backend offers; imports no backend."""
