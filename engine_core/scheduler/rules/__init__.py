"""Rules that narrow what a step may hold, one feature a file: the passes over running and waiting
requests ask them."""
