"""Models that read a whole text at once: embeddings, classes, scores."""
