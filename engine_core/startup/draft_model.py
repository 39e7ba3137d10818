"""The model that is served, and with it the one or the head that makes drafts for it."""

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from engine_core.distributed.collectives import SINGLE_RANK, Collectives
from engine_core.errors import ConfigurationError
from engine_core.model_files import ModelFiles, open_model_files
from engine_core.model_runner.config import DraftConfig
from engine_core.models.decoder import decoder_of
from engine_core.models.errors import ModelConfigError, ModelWeightsError, UnsupportedArchitecture
from engine_core.models.heads.eagle_config import is_eagle3
from engine_core.models.heads.head import DraftHead
from engine_core.models.loading import load_eagle_head, load_mtp_head
from engine_core.models.text_part import TEXT_PLACES
from engine_core.options.engine import EngineOptions
from engine_core.options.refusals import FIRST_LAYERS, refuse_unsupported
from engine_core.options.speculation import QuantizationName
from engine_core.startup.device import float_weights_of, keeps_blocks
from engine_core.startup.model import LoadedModel, load_any_model
from engine_core.startup.multimodal import with_encoder
from kernels.backends import select_operations

if TYPE_CHECKING:
    from kernels.interface.weights import WeightPart

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def load_with_draft(
    options: EngineOptions,
    files: ModelFiles,
    device: torch.device,
    collectives: Collectives = SINGLE_RANK,
) -> LoadedModel:
    """`load_any_model`, with its `draft` where the options name one.
    Raises ConfigurationError: the draft model cannot make drafts for this one."""
    loaded = load_any_model(options, files, device, collectives)
    refuse_unsupported(options, loaded.model, loaded.architecture)
    loaded = with_encoder(options, files, loaded)
    name = options.speculation.draft_model
    if options.speculation.speculative == "mtp":
        return _with_own_head(options, files, loaded)
    if name is None:
        return loaded
    if options.speculation.speculative == "eagle":
        return _with_eagle_head(name, options, files, loaded)
    num_layers = _num_first_layers(name, loaded)
    if num_layers is not None and options.speculation.draft_quantization is None:
        return _with_first_layers(loaded, files, num_layers)
    if num_layers is None:
        draft_files = open_model_files(name, option="--draft-model", report=logger.info)
        if is_eagle3(draft_files.config):
            raise ConfigurationError(
                f"--draft-model {name} is an EAGLE-3 head; use --speculative eagle"
            )
        _check_tokenizers(files, draft_files)
    else:
        draft_files = FirstLayers(files, num_layers)
    draft = load_any_model(
        dataclasses.replace(
            options,
            model=name,
            # float32 is what a CPU computes in; given by name it would undo the file's own blocks
            dtype="auto" if loaded.dtype is torch.float32 else options.dtype,
            quantization=options.speculation.draft_quantization or "auto",
            load_format="auto",
            model_config=None,
            model_impl="native",
            cpu_experts=0,
            batch_invariant=False,
        ),
        draft_files,
        device,
    )
    if not loaded.traits.is_host and draft.dtype != loaded.dtype:
        raise ConfigurationError(
            f"--draft-model {name} computes in {draft.numbers.name}, the model in "
            f"{loaded.numbers.name}, and they share blocks; give --dtype {loaded.numbers.name}"
        )
    return _with(loaded, DraftConfig(draft.model, draft.ops), options, draft_files, draft.weights)


def _with(
    loaded: LoadedModel, draft: DraftConfig, options: EngineOptions, files: ModelFiles, weights: str
) -> LoadedModel:
    """`files`, `weights`: the draft model's, and how they are kept."""
    _check_shapes(str(options.speculation.draft_model), draft, loaded, options.max_model_len)
    return dataclasses.replace(
        loaded, draft=draft, draft_fingerprint=f"{files.fingerprint} {weights}"
    )


def _with_eagle_head(
    name: str, options: EngineOptions, files: ModelFiles, loaded: LoadedModel
) -> LoadedModel:
    head_files = open_model_files(name, option="--draft-model", report=logger.info)
    _check_tokenizers(files, head_files)
    try:
        loaded = _with_head(load_eagle_head, options, head_files, loaded)
    except _NO_HEAD as error:
        raise ConfigurationError(
            f"--draft-model {name}: {error}; name an EAGLE-3 head that was made for {files.name}, "
            "or use --speculative draft with a small model"
        ) from error
    assert loaded.draft is not None and isinstance(loaded.draft.model, DraftHead)
    layers = loaded.draft.model.state_layers
    logger.info("drafts of an EAGLE-3 head, from states that enter layers %s", layers)
    return loaded


def _with_own_head(options: EngineOptions, files: ModelFiles, loaded: LoadedModel) -> LoadedModel:
    """The head for multi-token prediction that the model's files hold."""
    if options.load_format == "dummy":
        raise ConfigurationError(
            "--speculative mtp needs the head of a checkpoint, and --load-format dummy has none; "
            "omit it"
        )
    try:
        return _with_head(load_mtp_head, options, files, loaded)
    except _NO_HEAD as error:
        raise ConfigurationError(
            f"--speculative mtp: {files.name}: {error}; use --speculative ngram, or name a "
            "checkpoint that has them"
        ) from error


_NO_HEAD = (UnsupportedArchitecture, ModelConfigError, ModelWeightsError)


def _with_head(
    load: Callable[..., DraftHead], options: EngineOptions, files: ModelFiles, loaded: LoadedModel
) -> LoadedModel:
    """The model with the head of these files. Raises one of `_NO_HEAD`."""
    # beside a model in few bits a head in 32 would take a tenth of a step
    quantization: QuantizationName = "int8" if loaded.computes_in_bytes else "auto"
    quantization = options.speculation.draft_quantization or quantization
    ops = select_operations(
        loaded.ops.device,
        batch_invariant=False,
        float_weights=(
            loaded.numbers.weights if quantization == "auto" else float_weights_of(quantization)
        ),
        keeps_blocks=keeps_blocks(quantization, "auto"),
        num_threads=options.num_threads,
        quantised_types=files.quantised_types,
        report=logger.info,
    )
    head = load(
        files.config,
        files.tensors(keeps_blocks=ops.weight_packing(loaded.dtype) is not None),
        decoder_of(loaded.model, "drafts"),
        dtype=loaded.dtype,
        ops=ops,
        max_model_len=options.max_model_len,
    )
    return _with(loaded, DraftConfig(head, ops), options, files, quantization)


def _num_first_layers(name: str, loaded: LoadedModel) -> int | None:
    """None: `name` is another model's."""
    if not name.startswith(FIRST_LAYERS):
        return None
    most = loaded.model.spec.num_layers - 1
    text = name.removeprefix(FIRST_LAYERS)
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ConfigurationError(
            f"--draft-model {name}: the number of layers must be from 1 to {most}, as the model "
            f"has {most + 1}"
        )
    return int(text)


def _with_first_layers(loaded: LoadedModel, files: ModelFiles, num_layers: int) -> LoadedModel:
    """They take no memory of their own."""
    model = decoder_of(loaded.model, "drafts")
    draft = DraftConfig(model.first_layers(num_layers), loaded.ops)
    known_as = f"{files.fingerprint} {num_layers}"
    return dataclasses.replace(loaded, draft=draft, draft_fingerprint=known_as)


def _check_shapes(
    name: str, draft: DraftConfig, loaded: LoadedModel, max_model_len: int | None
) -> None:
    ours, theirs = loaded.model.spec, draft.model.spec
    if theirs.vocab_size != ours.vocab_size:
        raise ConfigurationError(
            f"--draft-model {name} has a vocabulary of {theirs.vocab_size} tokens, the model one "
            f"of {ours.vocab_size}: its drafts would be other tokens; name a model of the same "
            "vocabulary"
        )
    longest = max_model_len or ours.max_model_len
    if theirs.max_model_len < longest:
        raise ConfigurationError(
            f"--draft-model {name} was made for {theirs.max_model_len} tokens, requests may have "
            f"{longest}; lower --max-model-len, or name another model"
        )
    names = [ops.name.removesuffix("-batch-invariant") for ops in (draft.ops, loaded.ops)]
    if names[0] != names[1]:
        raise ConfigurationError(
            f"--draft-model {name} runs on {draft.ops.name}, the model on {loaded.ops.name}, and "
            "they cannot share a KV cache; give both the same dtype"
        )


def _check_tokenizers(files: ModelFiles, draft_files: ModelFiles) -> None:
    """Where both are known, each token must have the same number in both."""
    ours, theirs = files.tokenizer(), draft_files.tokenizer()
    if ours is None or theirs is None or ours.tokenizer_json == theirs.tokenizer_json:
        return
    numbers, others = _vocabulary(ours.tokenizer_json), _vocabulary(theirs.tokenizer_json)
    differing = sorted(text for text in numbers if numbers[text] != others.get(text))
    if differing:
        text = differing[0]
        raise ConfigurationError(
            f"--draft-model {draft_files.name} has another vocabulary than {files.name}: "
            f"{len(differing)} tokens differ, such as {text!r:.40}, number {numbers[text]} there "
            f"and {others.get(text)} here; name a model of the same vocabulary"
        )


def _vocabulary(tokenizer_json: bytes) -> dict[str, int]:
    """Numbers of the tokens; of a unigram model their places are."""
    document = json.loads(tokenizer_json)
    known: Any = document["model"].get("vocab", {})
    if isinstance(known, list):
        known = {text: number for number, (text, *_) in enumerate(known)}
    return dict(known) | {each["content"]: each["id"] for each in document.get("added_tokens", ())}


class FirstLayers:
    """The first layers of a model's files, as files of a model of its own."""

    def __init__(self, files: ModelFiles, num_layers: int) -> None:
        self._files = files
        self._num_layers = num_layers
        self.name = f"{files.name}, first {num_layers} layers"
        self.path = files.path
        self.config = first_layers_config(files.config, num_layers)
        self.generation_config = files.generation_config
        self.weight_files = files.weight_files
        self.quantised_types = files.quantised_types
        self.given_tokenizer = files.given_tokenizer
        self.mmproj = files.mmproj

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._files.eos_token_ids

    @property
    def num_weights(self) -> int:
        return self._files.num_weights

    @property
    def fingerprint(self) -> str:
        return f"{self._files.fingerprint}-{self._num_layers}"

    def tensors(self, *, keeps_blocks: bool = False) -> "Iterator[tuple[str, WeightPart]]":
        for name, tensor in self._files.tensors(keeps_blocks=keeps_blocks):
            layer = _LAYER.search(name)
            if layer is None or int(layer[1]) < self._num_layers:
                yield name, tensor

    def tokenizer(self) -> None:
        return None


def first_layers_config(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Lists with an entry a layer are cut, also of a text model inside another."""
    cut = dict(config)
    for place in TEXT_PLACES:
        if isinstance(text := config.get(place), Mapping):
            cut[place] = first_layers_config(text, num_layers)
    if (before := config.get("num_hidden_layers")) is None:
        return cut
    for key, value in config.items():
        if isinstance(value, list) and len(value) == before:
            cut[key] = value[:num_layers]
    cut["num_hidden_layers"] = num_layers
    return cut
