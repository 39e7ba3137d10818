"""How many tokens a step has."""
