"""Any decoder-only architecture that transformers knows and that has no code here. transformers
takes seconds to import, so it is imported when a model is loaded.

    folder -> transformers' model -> plain run (the reference)
                                     |- all tokens of a step at once, through our paged attention
                                     |- if that is not the same: request by request
                                     `- if that is not either: refused by name
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine_core.models.config_names import SPELLINGS, architecture_of, size_in
from engine_core.models.errors import ModelError, ModelWeightsError, UnsupportedArchitecture
from engine_core.models.interface import Model, ModelSpec
from engine_core.models.layer_cache import PagedKeys
from engine_core.models.text_part import TENSOR_PREFIXES, text_part, text_tensor
from kernels.interface.operations import Operations

if TYPE_CHECKING:
    from engine_core.models.transformers.reference import Reference

logger = logging.getLogger(__name__)

_ASSUMED_LENGTH = 2048
_TEXT_TENSORS = {f"^{re.escape(whole)}": text for whole, text in TENSOR_PREFIXES}
_SUPPORTED = "decoder-only language models with attention in every layer are supported"


def load_transformers_model(
    path: Path, config: dict[str, Any], *, dtype: torch.dtype, ops: Operations
) -> Model:
    """Load a model folder through transformers and check that it runs right over paged blocks.

    Args:
        path: a Hugging Face model folder.
        config: its config.json.
        dtype: of the weights and the cache.

    Raises:
        UnsupportedArchitecture: transformers does not know it, it is not a decoder with attention
            in every layer, or it does not give the same logits over a paged cache.
        ModelWeightsError: tensors are missing or of a wrong shape.
        ModelError: transformers cannot load it for another reason.
    """
    from transformers import AutoModelForCausalLM

    text = text_part(config)
    _refuse_by_config(text or config)
    model = load_pretrained(path, config, dtype, AutoModelForCausalLM, text=text)
    if model._can_set_experts_implementation():
        # the reference's; the grouped product needs rows of whole 16 bytes on a CPU
        model.set_experts_implementation("eager")
    model.to(ops.device)
    with torch.inference_mode():
        return _make_runnable(model, dtype, ops)


def _refuse_by_config(config: Mapping[str, Any]) -> None:
    name = architecture_of(config)
    for key in ("vision_config", "audio_config"):
        if config.get(key) is not None:
            raise UnsupportedArchitecture(f"{name} is multimodal (it has a {key}); {_SUPPORTED}")
    if config.get("quantization_config") is not None:
        method = config["quantization_config"].get("quant_method", "of an unnamed method")
        raise UnsupportedArchitecture(
            f"{name} is quantised ({method}), only GGUF files may be; use the original weights"
        )
    if config.get("use_bidirectional_attention") is True:
        raise UnsupportedArchitecture(f"{name} attends in both directions; {_SUPPORTED}")
    if config.get("index_topk") is not None:
        raise UnsupportedArchitecture(
            f"{name} attends to tokens that an indexer chooses (DeepSeek sparse attention), which "
            f"is not computed here; {_SUPPORTED}"
        )
    if "chunked_attention" in (config.get("layer_types") or ()):
        raise UnsupportedArchitecture(
            f"{name} attends in chunks of its context, which no attention here does (Llama 1 to 3, "
            f"without them, run); {_SUPPORTED}"
        )


def load_pretrained(
    path: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    auto_class: Any,
    *,
    text: Mapping[str, Any] | None = None,
) -> Any:
    """A folder's model, as this class of transformers ("AutoModelFor...") loads it; its text alone,
    if that is `text`.

    Raises:
        UnsupportedArchitecture: transformers does not know it, or not as such a model.
        ModelWeightsError: tensors are missing or of a wrong shape.
        ModelError: transformers cannot load it for another reason.
    """
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        if text is None:
            auto_config = AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        else:
            config = text
            fields = {name: value for name, value in text.items() if name != "model_type"}
            auto_config = AutoConfig.for_model(text["model_type"], **fields)
    except (ValueError, KeyError) as error:
        raise UnsupportedArchitecture(
            f"neither this engine nor transformers knows {architecture_of(config)} "
            f"(model_type {config.get('model_type')!r}): {_first_line(error)}"
        ) from error
    if type(auto_config) not in auto_class._model_mapping:
        kind = auto_class.__name__.removeprefix("AutoModelFor")
        raise UnsupportedArchitecture(
            f"{architecture_of(config)} is not a model of transformers' kind {kind}, and there is "
            f"no code of our own for it; {_SUPPORTED}"
        )
    try:
        model, report = auto_class.from_pretrained(
            path,
            config=auto_config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            key_mapping=None if text is None else _TEXT_TENSORS,
        )
    except Exception as error:
        # code of others, for any of 190 architectures: whatever it raises, the model is not loaded
        raise ModelError(f"transformers cannot load {path}: {_first_line(error)}") from error
    wrong = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    made = type(model).__name__
    if wrong and text is None and made != architecture_of(config):
        raise UnsupportedArchitecture(
            f"{architecture_of(config)} is not supported: {len(wrong)} tensors of a {made} are not "
            f"there or of a wrong shape ({wrong[0]}, ...), so it is another model; {_SUPPORTED}"
        )
    if wrong:
        raise ModelWeightsError(
            f"{path}: {len(wrong)} tensors of {architecture_of(config)} are missing or of a wrong "
            f"shape ({', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''}); "
            "use the model's complete folder"
        )
    if text is not None and (left := sorted(filter(text_tensor, report["unexpected_keys"]))):
        raise ModelWeightsError(
            f"{path}: {len(left)} tensors have no place in {architecture_of(text)} "
            f"({', '.join(left[:5])}{', ...' if len(left) > 5 else ''}); its code is another's"
        )
    return model.eval()


def _make_runnable(model: Any, dtype: torch.dtype, ops: Operations) -> Model:
    from engine_core.models.transformers.attention import PerRequestModel
    from engine_core.models.transformers.experts import take_experts
    from engine_core.models.transformers.reference import largest_difference, run_reference

    own_attention = model.config._attn_implementation
    name = type(model).__name__
    try:
        reference = run_reference(model)
    except UnsupportedArchitecture:
        raise
    except Exception as error:
        raise UnsupportedArchitecture(
            f"{name} does not run as a plain language model: {_first_line(error)}; {_SUPPORTED}"
        ) from error
    if dtype is torch.float32 and ops.device.type == "cpu" and (taken := take_experts(model, ops)):
        logger.info("%s runs the experts of %d layers in our own code", name, taken)
    flattened = _flattened(model, reference, dtype, ops)
    if flattened is not None:
        return flattened
    model.set_attn_implementation(own_attention)
    runnable = PerRequestModel(
        reference.body,
        # the model masks by itself what has left a window, so all of it is kept
        _spec(
            model,
            reference,
            num_query_heads=_whole_groups(model, {keys.num_kv_heads for keys in reference.layers}),
            layers=tuple(replace(keys, window=None) for keys in reference.layers),
        ),
    )
    try:
        off = largest_difference(runnable, reference, dtype=dtype, ops=ops)
    except Exception as error:
        raise UnsupportedArchitecture(
            f"{name} does not run over a paged cache: {_first_line(error)}; {_SUPPORTED}"
        ) from error
    if off > 1:
        raise UnsupportedArchitecture(
            f"{name} gives other logits in pieces over a paged cache than at once ({off:.1f} times "
            f"what rounding explains), so its answers would be wrong; {_SUPPORTED}"
        )
    logger.info("%s runs request by request, in transformers' own attention", name)
    return runnable


def _flattened(
    model: Any, reference: Reference, dtype: torch.dtype, ops: Operations
) -> Model | None:
    """The model with our attention in it; None, with the reason logged, if that is not the same."""
    from engine_core.models.transformers.attention import (
        FlattenedModel,
        UnsupportedAttention,
        record_attention,
        switch_to_paged_attention,
    )
    from engine_core.models.transformers.reference import largest_difference

    name = type(model).__name__
    try:
        switch_to_paged_attention(model)
        calls = record_attention(reference.body, reference.token_ids[0])
        windows = [call.sliding_window for call in calls]
        if windows != (kept := [keys.window for keys in reference.layers]):
            raise UnsupportedAttention(
                f"its layers ask for windows {windows}, its cache has {kept}"
            )
        if [call.num_kv_heads for call in calls] != [
            keys.num_kv_heads for keys in reference.layers
        ]:
            raise UnsupportedAttention("it does not cache the keys that it attends to")
        spec = _spec(
            model, reference, num_query_heads=calls[0].num_query_heads, layers=reference.layers
        )
        runnable = FlattenedModel(reference.body, spec)
        off = largest_difference(runnable, reference, dtype=dtype, ops=ops)
    except Exception as error:
        # whatever the model's code raises, the other way to run it is still open
        logger.info("%s does not take our attention: %s", name, _first_line(error))
        return None
    if off > 1:
        logger.info("%s gives other logits with our attention (%.1f)", name, off)
        return None
    return runnable


def _whole_groups(model: Any, num_kv_heads: set[int]) -> int:
    """Query heads, for plans without results: they need as many for each key/value head."""
    least = math.lcm(*num_kv_heads)
    num_heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", least)
    return num_heads if num_heads % least == 0 else least


def _spec(
    model: Any, reference: Reference, *, num_query_heads: int, layers: tuple[PagedKeys, ...]
) -> ModelSpec:
    return ModelSpec(
        layers=layers,
        num_query_heads=num_query_heads,
        hidden_size=reference.embedding_size,
        vocab_size=reference.vocab_size,
        max_model_len=_max_model_len(model.config.get_text_config(decoder=True)),
    )


def _max_model_len(config: Any) -> int:
    """Tokens that the model was made for.

    Phi-3's "longrope" turns all angles another way once a sequence has grown past the original
    length, those of keys that are in the cache already included; so it ends there."""
    names = SPELLINGS["max_position_embeddings"]
    length = size_in({name: getattr(config, name, None) for name in names}, names[0])
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and original:
        length = min(int(original), length or int(original))
    if length is not None:
        return length
    logger.warning(
        "the config of %s names no length; %d tokens are assumed",
        type(config).__name__,
        _ASSUMED_LENGTH,
    )
    return _ASSUMED_LENGTH


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
