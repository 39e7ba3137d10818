"""Coverage-guided fuzzing of everything that reads bytes of others: `make fuzz`."""
