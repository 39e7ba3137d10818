"""What a client and the engine share: messages, their checks, errors, addresses. Imports only the
standard library and msgspec; must not know sockets, tokenizers or torch."""
