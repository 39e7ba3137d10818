"""What encoders of encoder-decoder models take: one text or one sound a request."""

from engine_core.models.multimodal.interface import Tensors


class EncoderInputs:
    """Implements `engine_core.models.multimodal.interface.InputFamily`.

    Args:
        modality: "text" or "audio".
        most_rows: tokens of an input.
        vocab_size: of a text.
        num_mel_bins: of a sound, which has two frames a row.
    """

    is_bidirectional = False
    is_causal_without_window = False
    has_axes = False
    is_cross_attended = True
    num_added_layers = 0

    def __init__(
        self, modality: str, *, most_rows: int, vocab_size: int, num_mel_bins: int | None
    ) -> None:
        self.modalities: tuple[str, ...] = (modality,)
        self.most_rows = most_rows
        self._vocab_size = vocab_size
        self._num_mel_bins = num_mel_bins

    def num_rows(self, modality: str, tensors: Tensors) -> int:
        name, dtypes = "input_ids", ("int64", "int32")
        if self._num_mel_bins is not None:
            name, dtypes = "input_features", ("float32", "float16")
        if modality != self.modalities[0] or set(tensors) != {name}:
            raise ValueError(
                f"an input is of type {modality!r:.40} with the tensors {sorted(tensors)}, the "
                f"model's encoder takes type {self.modalities[0]!r} with {name}; send that"
            )
        array = tensors[name]
        if array.dtype.name not in dtypes:
            raise ValueError(f"{name} is {array.dtype.name}, it must be one of {', '.join(dtypes)}")
        if self._num_mel_bins is not None:
            wanted = (self._num_mel_bins, 2 * self.most_rows)
            if array.shape != wanted:
                raise ValueError(
                    f"input_features has shape {list(array.shape)}, it must be {list(wanted)}; "
                    "send what the model's own feature extractor makes"
                )
            return self.most_rows
        if array.ndim != 1 or not 1 <= len(array) <= self.most_rows:
            raise ValueError(
                f"input_ids has shape {list(array.shape)}, the encoder takes from 1 to "
                f"{self.most_rows} tokens; send a shorter text"
            )
        if int(array.min()) < 0 or int(array.max()) >= self._vocab_size:
            raise ValueError(
                f"input_ids has tokens from {int(array.min())} to {int(array.max())}, the "
                f"vocabulary ends at {self._vocab_size - 1}; use this model's own tokenizer"
            )
        return len(array)

    def grid(self, tensors: Tensors) -> tuple[int, int]:
        raise NotImplementedError
