"""Adapters (LoRA): read from files, checked against the model, kept in a bounded pool of slots.

Must not know sockets; what a step may use is the scheduler's to decide."""
