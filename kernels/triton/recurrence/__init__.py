"""Layers with a recurrent state in blocks: see `kernels.interface.recurrence`."""
