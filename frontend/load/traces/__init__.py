"""Requests in order of arrival, synthetic or from files: for load tests and the simulator."""


class TraceError(Exception):
    """A wrong option, file or row; the text names value, limit and next action. Any function of
    this package may raise it."""
