"""Structured output: grammars compiled beside the loop, and masks of the tokens that they allow.

All of llguidance is here. It knows nothing of models, devices or sockets."""
