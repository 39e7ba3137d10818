"""Times of a GPU. What is timed, and the check that it must pass first, are those of tests/gpu."""
