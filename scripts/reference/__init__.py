"""Pages of the reference, made from the code when the site is built: they cannot be wrong."""
