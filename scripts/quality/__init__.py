"""The quality of formats: models by the daemon's options, and the perplexity of a text."""
