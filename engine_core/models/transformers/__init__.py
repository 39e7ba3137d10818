"""Models run through transformers' own code."""
