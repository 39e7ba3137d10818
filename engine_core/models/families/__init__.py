"""A file a family of models: its names, how its config.json is read, what its blocks are, and how
llama.cpp's files spell it. `table.py` finds them. Needs no torch: files are opened before it."""
