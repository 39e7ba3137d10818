"""The handshake: what a client is told of the model when it says HELLO."""

import hashlib
import secrets
from typing import Any

import torch
from msgspec.structs import replace

from engine_core.kv_cache import sizes_of
from engine_core.model_files import ModelFiles
from engine_core.model_files.interface import TokenizerFiles
from engine_core.server.transport import Frame
from engine_core.startup.before_torch import OpenModel
from engine_core.startup.config import EngineConfig
from engine_core.startup.encoder_decoder import encoder_info
from engine_core.startup.multimodal import multimodal_info, text_only_note
from engine_core.startup.runner_spec import RunnerSpec
from protocol.base import WIRE_VERSION
from protocol.calls import AdapterInfo
from protocol.multimodal import TensorRef
from protocol.outputs import DisaggregationInfo, ModelInfo, TokenizerInfo, Welcome
from protocol.prompt_embeds import PromptEmbedsInfo
from protocol.requests import Hello

HEARTBEAT_S = 0.25
"""Longest silence towards a client, so that a dead one is found within that time."""


class Handshake:
    """The answer to a HELLO: what a client must know of the model, and the tokenizer.

    Args:
        model: what clients are sent, without the tokenizer.
        tokenizer: None if the model has none.
        heartbeat_s: longest time between two messages to a client.
    """

    def __init__(
        self, model: ModelInfo, tokenizer: TokenizerFiles | None, *, heartbeat_s: float
    ) -> None:
        self._welcome = Welcome(WIRE_VERSION, secrets.token_hex(8), heartbeat_s, model)
        self._document = b""
        if tokenizer is not None:
            self._document = tokenizer.tokenizer_json
            info = TokenizerInfo(
                fingerprint=hashlib.sha256(self._document).hexdigest()[:32],
                tokenizer_json=None,
                chat_template=tokenizer.chat_template,
                special_tokens=tokenizer.special_tokens,
                named_chat_templates=tokenizer.named_chat_templates,
            )
            self._welcome = replace(self._welcome, model=replace(model, tokenizer=info))

    def use_weights(self, version: int, fingerprint: str) -> None:
        """Those that are served from now on."""
        model = replace(self._welcome.model, weights_version=version, fingerprint=fingerprint)
        self._welcome = replace(self._welcome, model=model)

    def use_adapters(self, adapters: tuple[AdapterInfo, ...]) -> None:
        """Those that requests may name from now on."""
        model = replace(self._welcome.model, adapters=adapters)
        self._welcome = replace(self._welcome, model=model)

    def use_disaggregation(self, info: DisaggregationInfo | None) -> None:
        self._welcome = replace(self._welcome, disaggregation=info)

    def welcome(self, hello: Hello) -> tuple[Welcome, list[Frame]]:
        """The message and the binary frames behind it."""
        model = self._welcome.model
        if not hello.wants_tokenizer or model.tokenizer is None:
            return self._welcome, []
        document = TensorRef(frame=0, dtype="uint8", shape=(len(self._document),))
        full = replace(model, tokenizer=replace(model.tokenizer, tokenizer_json=document))
        return replace(self._welcome, model=full), [self._document]


def make_handshake(
    opened: OpenModel,
    config: EngineConfig,
    spec: RunnerSpec,
    prompt_embeds: PromptEmbedsInfo | None,
) -> Handshake:
    loaded = spec.loaded
    files, ops, pooler = opened.files, loaded.ops, loaded.pooler
    instruction_set = ops.name
    if loaded.traits.compiles_kernels:
        instruction_set += f" {ops.instruction_set}"
    else:
        instruction_set += f", torch {torch.backends.cpu.get_cpu_capability()}"
    model = ModelInfo(
        name=config.model,
        architecture=config.architecture,
        fingerprint=files.fingerprint,
        max_model_len=config.scheduler.max_model_len,
        vocab_size=spec.config.vocab_size,
        dtype=config.dtype,
        num_blocks=sum(sizes_of(config.num_blocks)),
        block_size=config.block_size,
        eos_token_ids=files.eos_token_ids,
        max_logprobs=config.max_logprobs,
        max_num_seqs=config.scheduler.max_num_seqs,
        default_sampling=recommended_sampling(files.generation_config),
        instruction_set=instruction_set,
        formats=", ".join(
            [config.weights, f"KV cache {config.kv_cache_dtype}", config.model_impl]
            + [f"logits processor {name}" for name in config.logits_processors]
            + [f"{config.logprobs_mode} reported"] * (config.logprobs_mode != "raw_logprobs")
            + text_only_note(files, spec.loaded)
        ),
        file_format=files.weight_files[0].suffix[1:] if files.weight_files else "",
        file_bytes=sum(file.stat().st_size for file in files.weight_files),
        num_weights=_num_weights(files),
        encoder=encoder_info(spec.loaded.model, files.config, files.generation_config),
        prompt_embeds=prompt_embeds,
        multimodal=multimodal_info(spec.options, files, spec.loaded),
        tasks=("generate",) * loaded.generates + (() if pooler is None else pooler.config.tasks),
        prompts={} if files.modules is None else files.modules.prompts,
        labels=files.labels if pooler is not None and pooler.config.num_labels else (),
        default_prompt_name=None if files.modules is None else files.modules.default_prompt_name,
        has_segments=files.is_encoder,
        has_priorities=config.scheduler.scheduling_policy != "fcfs",
    )
    return Handshake(model, opened.tokenizer, heartbeat_s=HEARTBEAT_S)


def _num_weights(files: ModelFiles) -> int:
    """0: several are packed into an element of the files."""
    is_packed = files.quantised_types and any(f.suffix != ".gguf" for f in files.weight_files)
    return 0 if is_packed or not files.weight_files else files.num_weights


def recommended_sampling(generation_config: dict[str, Any]) -> dict[str, float]:
    """The sampling values of generation_config.json that this engine knows."""
    known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {
        name: float(value)
        for name in known
        if isinstance(value := generation_config.get(name), int | float)
    }
