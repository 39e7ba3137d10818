"""What the GPU machine runs: checks of every kernel, then timings of those that passed."""
