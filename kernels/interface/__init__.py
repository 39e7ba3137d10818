"""What a backend offers; imports no backend."""
