"""Decoders that are served as encoders: their tokens see the whole prompt."""

from engine_core.models.decoder import Decoder
from engine_core.models.encoders.encoder import Encoder
from engine_core.models.interface import Feature


class BidirectionalDecoder(Decoder):
    """A decoder's layers, where a window reaches to both sides: plans of its attention are
    bidirectional, and each prompt is whole in a step. It has no head."""

    supports: frozenset[Feature] = frozenset()


AnyEncoder = Encoder | BidirectionalDecoder
"""A model whose prompts are whole in a step, of which nothing is kept for the next."""
