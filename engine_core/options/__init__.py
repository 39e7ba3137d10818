"""The daemon's options, as typed. Imports no torch: `--help` reads this."""
