"""GGUF metadata to a config.json as transformers 5 writes it, for the architectures served. What
changes the mathematics and is not understood is refused by name.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's llama-hparams.h"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from engine_core.model_files.errors import BrokenModelFile, UnsupportedModelFile
from engine_core.model_files.gguf.header import GgufTensor
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Gguf
from engine_core.models.families.table import GGUF_ARCHITECTURES, family_of_gguf

_REQUIRED = object()
_LISTS = {"tokens": str, "merges": str, "token_type": int, "scores": float}
_LISTS |= {"precompiled_charsmap": int}
_SINGLE = {"model": str, "pre": str} | dict.fromkeys(
    ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id",
     "padding_token_id", "cls_token_id", "seperator_token_id", "mask_token_id"), int,
)  # fmt: skip
"""Types of the keys tokenizer.ggml.*."""
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type


class GgufMetadata:
    """Metadata of one file with the architecture's prefix understood and errors that name it.
    `tensors`: of the file, by name. `numbers`: reads one."""

    def __init__(
        self,
        file: str,
        metadata: dict[str, Any],
        tensors: Mapping[str, GgufTensor] | None = None,
        numbers: Callable[[GgufTensor], list[float]] | None = None,
    ) -> None:
        self.file = file
        self.raw = metadata
        self.tensors = tensors or {}
        self._numbers = numbers
        self._skips_zeros = False
        self._by_layer: frozenset[str] = frozenset()
        self.architecture = str(metadata.get("general.architecture"))
        family = family_of_gguf(self.architecture, self)
        if family is None or family.gguf is None:
            raise UnsupportedModelFile(
                f"{file} is of architecture {metadata.get('general.architecture')!r}; GGUF files "
                f"are read for {', '.join(GGUF_ARCHITECTURES)}; use the model's Hugging Face "
                f"folder"
            )
        self.family: Family = family
        self.gguf: Gguf = family.gguf
        self._skips_zeros = self.gguf.has_kinds
        self._by_layer = self.gguf.by_layer

        for names, is_list in ((_LISTS, True), (_SINGLE, False)):
            for name, kind in names.items():
                value = metadata.get(f"tokenizer.ggml.{name}")
                if value is None or (value == [] and is_list):
                    continue
                # a list's items are all of one type
                if isinstance(value, list) != is_list or not isinstance(
                    value[0] if is_list else value, kind
                ):
                    raise BrokenModelFile(
                        f"{file}: tokenizer.ggml.{name} is {value!r:.40}, it must be "
                        f"{'a list of ' if is_list else ''}{kind.__name__}; convert the model again"
                    )

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """Value of `<architecture>.<key>`: one number for all layers, or for all that have such a
        part (`Gguf.has_kinds`).

        Raises:
            BrokenModelFile: absent and without default.
            UnsupportedModelFile: a list that differs from layer to layer.
        """
        value = self.raw.get(f"{self.architecture}.{key}")
        if value is None:
            if default is _REQUIRED:
                raise BrokenModelFile(
                    f"{self.file} lacks {self.architecture}.{key}; convert the model again with a "
                    f"current llama.cpp"
                )
            return default
        if isinstance(value, list):
            if self._skips_zeros:
                value = [each for each in value if each] or value
            if len(set(value)) != 1 and key not in self._by_layer:
                self.refuse(f"{key} differs from layer to layer")
            value = value[0]
        # stored as float32; the shortest number that gives it is what the model's config said
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def values(self, key: str, default: Any) -> Any:
        """Value of `<architecture>.<key>` as it is: a number, or a list of one for each layer."""
        return self.raw.get(f"{self.architecture}.{key}", default)

    def numbers(self, tensor: str) -> list[float]:
        """What a short tensor holds. Raises BrokenModelFile: it is not there."""
        if tensor not in self.tensors or self._numbers is None:
            self.broken(f"there is no tensor {tensor}")
        return self._numbers(self.tensors[tensor])

    def num_rows(self, tensor: str) -> int:
        """Rows of a matrix. Raises BrokenModelFile: it is not there."""
        if tensor not in self.tensors:
            self.broken(f"there is no tensor {tensor}")
        shape = self.tensors[tensor].shape
        return shape[0] if len(shape) > 1 else 1  # llama.cpp has a row as a vector

    def refuse_unless(self, key: str, *allowed: Any) -> None:
        """Raises UnsupportedModelFile unless the number of that key is absent or one of these."""
        value = self.number(key, allowed[0])
        if value not in allowed:
            self.refuse(f"{key} {value}")

    def broken(self, what: str) -> NoReturn:
        """Raises: BrokenModelFile, always."""
        raise BrokenModelFile(f"{self.file}: {what}; convert the model again")

    def refuse(self, what: str) -> NoReturn:
        """Raises: UnsupportedModelFile, always."""
        raise UnsupportedModelFile(
            f"{self.file}: {what}, which is not supported for {self.architecture} GGUF files; use "
            f"the model's Hugging Face folder"
        )


# ---------------------------------------------------------------------- the whole config


def build_config(meta: GgufMetadata) -> dict[str, Any]:
    """The config.json that the model had before it was converted, in the fields that matter.

    Raises:
        BrokenModelFile: a needed key or tensor is missing, or two of them contradict each other.
        UnsupportedModelFile: an option is set that would change the result and is not read.
    """
    try:
        return _build_config(meta)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise BrokenModelFile(
            f"{meta.file} has metadata of a wrong type or value ({error}); download it again"
        ) from error


_LARGEST = {
    "num_hidden_layers": 10_000,
    "head_dim": 1 << 20,
    "num_attention_heads": 1 << 20,
    "num_key_value_heads": 1 << 20,
    "intermediate_size": 2**31 - 1,
    "max_position_embeddings": 2**31 - 1,
}


def _build_config(meta: GgufMetadata) -> dict[str, Any]:
    tensors, gguf = meta.tensors, meta.gguf
    hidden_size = int(meta.number("embedding_length"))
    num_heads = int(meta.number("attention.head_count"))
    num_layers = int(meta.number("block_count")) - int(meta.number("nextn_predict_layers", 0))
    head_dim = _head_dim(meta, hidden_size, num_heads)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise BrokenModelFile(f"{meta.file} has no matrix token_embd.weight; download it again")
    vocab_size, width = embedding.shape
    if width != hidden_size:
        meta.broken(f"embedding_length is {hidden_size}, the embedding has {width} columns")
    if meta.number("expert_count", 0) and not gguf.has_experts:
        meta.refuse("a mixture of experts")
    for key in _SCALES - gguf.scales:
        meta.refuse_unless(key, 1.0)
    meta.refuse_unless("attention.causal", gguf.is_causal)
    config: dict[str, Any] = {
        "model_type": meta.family.model_type,
        "architectures": [meta.family.names[0]],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": _intermediate_size(meta),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(meta.number("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "rms_norm_eps": float(meta.number(gguf.norm_eps)),
        "max_position_embeddings": int(meta.number("context_length")),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": rope_parameters(meta) | _part_that_turns(meta, head_dim),
        "dtype": _dtype(tensors),
    }
    for field, largest in _LARGEST.items():
        if not 0 < config[field] <= largest:
            raise BrokenModelFile(
                f"{meta.file}: {field} is {config[field]}, it must be from 1 to {largest}; "
                f"download it again"
            )
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{ours}_token_id"] = meta.raw.get(f"tokenizer.ggml.{theirs}_token_id")
    return config | _pooling(meta) | gguf.fields(meta, config)


_POOLING_TYPES = ("", "MEAN", "CLS", "LAST")
"""By their numbers in llama.cpp; the first, none, says nothing of vectors of texts."""


def _pooling(meta: GgufMetadata) -> dict[str, str]:
    kind = meta.number("pooling_type", 0)
    if kind not in range(len(_POOLING_TYPES)):
        meta.refuse(f"pooling_type {kind}")
    return {"pooling_type": _POOLING_TYPES[kind]} if kind else {}


def _intermediate_size(meta: GgufMetadata) -> int:
    """Of a dense layer; of an expert where the model has no such layer, and so no such key."""
    size = meta.number("expert_feed_forward_length", 0) if meta.gguf.has_experts else 0
    return int(meta.number("feed_forward_length", size or _REQUIRED))


def _part_that_turns(meta: GgufMetadata, head_dim: int) -> dict[str, float]:
    size = meta.number("rope.dimension_count", head_dim)
    return {} if size == head_dim else {"partial_rotary_factor": size / head_dim}


_SCALES = frozenset({"logit_scale", "residual_scale", "embedding_scale"})
"""Keys of Granite and others that borrow the name of an architecture."""


def _dtype(tensors: Mapping[str, GgufTensor]) -> str | None:
    """The floating type that most bytes have. F16 counts as bfloat16: models that were made in that
    have larger activations than a float16."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.quant_type.name] += tensor.num_bytes
    ((largest, _),) = sizes.most_common(1)
    return {"F16": "bfloat16", "BF16": "bfloat16", "F32": "float32"}.get(largest)


def _head_dim(meta: GgufMetadata, hidden_size: int, num_heads: int) -> int:
    if meta.gguf.has_latents:
        return int(meta.number("rope.dimension_count"))
    head_dim = int(meta.number("attention.key_length", 0))
    if not head_dim:
        if num_heads <= 0 or hidden_size % num_heads:
            raise BrokenModelFile(
                f"{meta.file}: {num_heads} heads do not divide a width of {hidden_size}, and "
                f"attention.key_length is not given; convert the model again"
            )
        head_dim = hidden_size // num_heads
    if meta.number("attention.value_length", head_dim) != head_dim:
        meta.refuse("keys and values of different lengths")
    if meta.number("rope.dimension_count", head_dim) != head_dim and not meta.gguf.turns_a_part:
        meta.refuse("rotary embedding of a part of each head")
    return head_dim


# ---------------------------------------------------------------------- rotary embedding


# transformers' and llama.cpp's own defaults agree on these
_BETA_FAST, _BETA_SLOW = 32.0, 1.0

# Llama 3.1 and 3.2 have these two and 8192; other lengths are tried for models made in their image
_LLAMA3_LOW_FREQ, _LLAMA3_HIGH_FREQ = 1.0, 4.0
_LLAMA3_ORIGINAL_LENS = (8192, *(1 << power for power in range(4, 22)))


def rope_parameters(meta: GgufMetadata) -> dict[str, Any]:
    """`rope_parameters` of the config, without the tensor of factors.
    Raises UnsupportedModelFile: a kind of scaling that is not read."""
    theta = float(meta.number("rope.freq_base", meta.gguf.theta))
    if not 0.0 < theta < math.inf:
        raise ValueError(f"rope.freq_base is {theta}, it must be a positive number")
    kind = meta.number("rope.scaling.type", None)
    # before there were kinds there was one number, for linear scaling
    factor = float(meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0)))
    if kind is None and factor not in (0.0, 1.0):
        kind = "linear"
    if kind in (None, "none") or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "yarn":
        meta.refuse(f"rotary scaling {kind!r}")
    log_multiplier = meta.number("rope.scaling.yarn_log_multiplier", 0.0)
    if log_multiplier and not meta.gguf.has_yarn_log:
        meta.refuse("rotary scaling with a YaRN log multiplier")
    parameters = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": int(
            meta.number("rope.scaling.original_context_length")
        ),
        "beta_fast": float(meta.number("rope.scaling.yarn_beta_fast", _BETA_FAST)),
        "beta_slow": float(meta.number("rope.scaling.yarn_beta_slow", _BETA_SLOW)),
    }
    if log_multiplier:
        parameters |= {"mscale": 1.0, "mscale_all_dim": float(log_multiplier)}
    # llama.cpp multiplies YaRN's own attention factor by a number of the file, if it has one
    extra = float(
        meta.number("rope.scaling.yarn_attn_factor", meta.number("rope.scaling.attn_factor", 1.0))
    )
    if extra != 1.0:
        parameters["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
    return parameters


def apply_frequency_factors(
    parameters: dict[str, Any], factors: Sequence[float], head_dim: int
) -> dict[str, Any]:
    """Account for the tensor `rope_freqs.weight`, by which each inverse frequency is divided.

    llama.cpp's converter writes Llama 3's frequency-dependent scaling that way; the parameters that
    give these factors are found again, so that the config is the model's own.
    Raises ValueError: no parameters of Llama 3's formula give the factors.

    Args:
        parameters: as `rope_parameters` gave them, of type "default".
        factors: head_dim / 2 numbers, highest frequency first.
    """
    if all(factor == 1.0 for factor in factors):
        return parameters
    if parameters["rope_type"] != "default":
        raise ValueError(f"it has rotary frequency factors and {parameters['rope_type']} scaling")
    theta = parameters["rope_theta"]
    factor = float(round(max(factors), 4))  # the lowest frequencies are divided by it
    for original_len in _LLAMA3_ORIGINAL_LENS:
        expected = _llama3_factors(theta, factor, original_len, head_dim)
        if len(expected) == len(factors) and all(
            math.isclose(a, b, rel_tol=1e-4) for a, b in zip(expected, factors, strict=True)
        ):
            return {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW_FREQ,
                "high_freq_factor": _LLAMA3_HIGH_FREQ,
                "original_max_position_embeddings": original_len,
            }
    raise ValueError("its rotary frequency factors are not Llama 3's")


def _llama3_factors(theta: float, factor: float, original_len: int, head_dim: int) -> list[float]:
    """The formula of transformers' `_compute_llama3_parameters`, as divisors."""
    low, high = _LLAMA3_LOW_FREQ, _LLAMA3_HIGH_FREQ
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        if wavelength < original_len / high:
            divisors.append(1.0)
        elif wavelength > original_len / low:
            divisors.append(factor)
        else:
            smooth = (original_len / wavelength - low) / (high - low)
            divisors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return divisors
