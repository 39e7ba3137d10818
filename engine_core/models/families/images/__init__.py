"""Decoders behind an encoder of images: where their config and tensors are in a checkpoint that
holds both."""
