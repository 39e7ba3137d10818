"""Clients of the daemon: sockets, handshake, messages, checks of requests."""
