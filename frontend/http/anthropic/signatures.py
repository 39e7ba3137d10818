"""Signatures of thinking, which clients keep and send back unread: here nothing is signed, and one
carries the text that the client asked not to see."""

import base64
import binascii

_NOTHING = "unsigned"
_TEXT = "text:"


def signature_of(omitted: str | None) -> str:
    """
    Args:
        omitted: the thinking that the block leaves out; None: it has it.
    """
    if omitted is None:
        return _NOTHING
    return _TEXT + base64.b64encode(omitted.encode()).decode()


def omitted_thinking(signature: str) -> str:
    """The thinking that `signature_of` was given; empty for a signature of another server."""
    if not signature.startswith(_TEXT):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_TEXT), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
