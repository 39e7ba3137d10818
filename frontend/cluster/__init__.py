"""Deployments on a Ray cluster. The only package that imports ray, and the only one of the engine's
that imports the client: an HTTP replica is a client of the engines."""
