"""Decoders of which some layers keep a recurrent state: a file a family."""
