"""What a client and the engine both know: messages, limits, errors, addresses.

Owns the wire: every message is a small tagged msgspec Struct, every socket has one typed decoder.
Must not know sockets, tokenizers, torch, or what either side does with a message.
Imports nothing but the standard library and msgspec.
"""
