"""What the rest of the engine sees of a model on disk, whatever its format."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from kernels.interface.weights import WeightPart


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """All that a client needs to turn text into tokens and back."""

    tokenizer_json: bytes
    """A `tokenizers` serialisation, UTF-8; encodes as transformers would, special tokens at the
    ends included."""
    chat_template: str | None
    """Jinja source, or None where the model has none."""
    special_tokens: dict[str, str]
    """By "bos_token", "eos_token", "unk_token", "pad_token", where set; and "fim_pre_token" and the
    others of filling in the middle that a GGUF file names."""
    named_chat_templates: dict[str, str] = dataclasses.field(default_factory=dict)
    """Others than `chat_template`, such as "tool_use"."""


def default_template(named: Mapping[str, object]) -> tuple[str | None, dict[str, str]]:
    """The chat template of conversations that ask for none, and the others by name."""
    sources = {name: source for name, source in named.items() if isinstance(source, str)}
    first = "default" if "default" in sources else next(iter(sources), "")
    return sources.pop(first, None), sources


class EncoderFile(Protocol):
    """An encoder of images in a file of its own, beside that of its text."""

    file: Path
    config: dict[str, Any]
    """The config.json of both."""
    processor: dict[str, Any]
    """The image processor's settings, those of a preprocessor_config.json."""

    def tensors(self) -> "dict[str, torch.Tensor]":
        """All weights by the names of transformers' module, in floating point."""


class ModelFiles(Protocol):
    """A model on disk, in Hugging Face terms. Opening one has checked that it is whole."""

    name: str
    """Short name to show: the folder's, the file's without suffix, or the hub id."""
    path: Path
    """The folder (Hugging Face layout) or the first file (GGUF)."""
    config: dict[str, Any]
    """As in `config.json`, but for how weights are quantised: `tensors` settles that."""
    generation_config: dict[str, Any]
    """The contents of `generation_config.json`; empty where there is none."""
    weight_files: tuple[Path, ...]
    """The files that hold the weights, in a fixed order."""
    quantised_types: frozenset[str]
    """Type names of the matrices that are quantised, see `tensors`; empty: none is."""
    mmproj: EncoderFile | None
    """Where the encoder of images is in a file of its own, beside a GGUF text."""
    given_tokenizer: TokenizerFiles | None
    """Takes the place of the model's own."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: generation config first, else config, else own tokenizer."""

    @property
    def num_weights(self) -> int:
        """Elements of all tensors of the files, by their headers, whichever `tensors` gives."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of sizes, headers, configuration and samples of the weights.

        Equal for equal files wherever they lie and whenever they were written."""

    def tensors(self, *, keeps_blocks: bool = False) -> "Iterator[tuple[str, WeightPart]]":
        """Each weight once, by its Hugging Face name, read when asked for.

        Floating point of any width (float32 where the file holds quantised values), on the CPU.
        `keeps_blocks`: matrices that the file holds in quantised blocks come as `QuantisedTensor`,
        mapped and not read yet. Raises BrokenModelFile: a file changed since it was opened."""

    def tokenizer(self) -> TokenizerFiles | None:
        """The tokenizer, or None where the files hold none.

        Raises:
            BrokenModelFile: there is one and it cannot be read.
            UnsupportedModelFile: there is one, of a kind that cannot be rebuilt faithfully.
        """
