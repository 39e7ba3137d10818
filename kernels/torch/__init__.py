"""The operations in plain torch: the CPU backend, and the reference for every other one."""
