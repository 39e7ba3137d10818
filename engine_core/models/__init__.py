"""Language models on top of `engine_core.layers`: `loading.load_model` makes a config.json and
tensors an `interface.Model`; `families/` has a file a family.

Must not know the scheduler, the runner or files. Reading a config needs no torch."""
