"""Proposers of drafts, one a file, behind `scheduler.speculation.base.Proposer`. None can change a
token: drafts are verified by the engine's own sampling."""
