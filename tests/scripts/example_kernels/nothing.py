"""Without variants(): it is left alone."""
