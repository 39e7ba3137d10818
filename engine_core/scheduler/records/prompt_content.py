"""What stands in a prompt beside its tokens: hidden states, images and sounds."""

from collections.abc import Iterable

from engine_core.kv_cache import ContentSpan
from engine_core.scheduler.records.mm_features import MultiModalFeature
from engine_core.scheduler.records.prompt_embeds import EmbeddedRows


class PromptContent:
    """
    Args:
        embeds: hidden states in place of embeddings, by rising positions.
        features: images and sounds, in order, without overlap.
        spans: what of the prompt is more than its tokens, beside `features`.

    Attributes:
        spans: those of the features among them, by rising positions.
        encoder_stop: behind the last position that depends on an encoder's output; 0 without any.
        num_encoder_tokens: rows that encoders make of the features.
    """

    def __init__(
        self,
        *,
        embeds: tuple[EmbeddedRows, ...] = (),
        features: Iterable[MultiModalFeature] = (),
        spans: Iterable[ContentSpan] = (),
    ) -> None:
        self.embeds = embeds
        self.features = tuple(features)
        inputs = (ContentSpan(each.start, each.stop, each.identifier) for each in self.features)
        self.spans = tuple(sorted((*spans, *inputs)))
        self.encoder_stop = self.features[-1].stop if self.features else 0
        self.num_encoder_tokens = sum(each.num_rows for each in self.features)

    @property
    def embeds_stop(self) -> int:
        """The end of the last range with hidden states in place of tokens; 0 without any."""
        return self.embeds[-1].stop if self.embeds else 0


TOKENS_ONLY = PromptContent()
