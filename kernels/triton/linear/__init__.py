"""Products with weights: dense, float8, packed, and adapters beside them."""
