"""Binary parts of messages, images and sounds of a prompt, and what a client needs to know to make
them of files."""

from protocol.base import Message


class TensorRef(Message, frozen=True):
    """A large binary part that travels as its own frame behind the message (no copy, no base64).

    `frame` counts the frames behind the message from 0; `dtype` is a little-endian name such as
    "float32"; the frame holds `prod(shape)` elements in row-major order."""

    frame: int
    dtype: str
    shape: tuple[int, ...]


class MultiModalInput(Message, frozen=True):
    """An image or sound, and the prompt positions `[start, stop)` that stand for it: rows of the
    encoder's output, and markers between them.

    start            stop
    | row row mark row row |     runs = ((0, 2), (3, 2))"""

    modality: str
    """"image" or "audio"."""
    start: int
    stop: int
    tensors: dict[str, TensorRef]
    """What the model's encoder takes, by transformers' names: pixel_values, image_grid_thw,
    pixel_attention_mask, input_features, feature_attention_mask. Of this input alone."""
    runs: tuple[tuple[int, int], ...] = ()
    """(offset from `start`, count) of positions that take one row of the encoder's output each, in
    order; () is all of them."""


class MultiModalInfo(Message, frozen=True):
    """All that a client needs to turn images and sounds into tensors, without the model's files."""

    model_type: str
    config_json: bytes
    """The model's config.json."""
    processor_json: bytes
    """preprocessor_config.json and processor_config.json merged; `{}` if there is neither."""
    max_items: dict[str, int]
    """Most inputs of a prompt, by modality: those that the model takes."""
    max_input_bytes: int
    """Most bytes of all tensors of a request."""
