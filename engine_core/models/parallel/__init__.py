"""A model on several ranks: one rank's part of each layer, and stages of layers."""
