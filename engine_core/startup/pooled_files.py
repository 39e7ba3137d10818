"""A model's files as those of one whose hidden states are pooled: what of them is its body, what
its head, and how sentence-transformers' files or options say to pool. Needs no torch by itself."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engine_core.errors import ConfigurationError, StartupError
from engine_core.model_files import ModelFiles, TokenizerFiles
from engine_core.model_files.hf_folder import token_id
from engine_core.model_files.json_file import read_json_object_if_present
from engine_core.model_files.sentence_modules import SentenceModules, read_modules
from engine_core.models.config_names import size_in
from engine_core.models.families.encoders.bge_m3 import BGE_M3
from engine_core.models.families.table import ENCODER_STEMS
from engine_core.options.pooling import PoolingOptions
from engine_core.pooler_config import PoolerConfig, PoolingType
from protocol.pooling import PoolingTask

if TYPE_CHECKING:
    from engine_core.model_runner.pooling import DenseLayer, Float32Array, Pooler
    from engine_core.models.interface import Model
    from kernels.interface.weights import WeightPart

_CLASSIFIERS = ("ForSequenceClassification", "ForRewardModel", "ForProcessRewardModel")
_ENCODER = re.compile(f"({'|'.join(ENCODER_STEMS)})(Model|For).*")
_HEADLESS = re.compile("(?!.*(LMHead|DoubleHeads|MT|Chat|Omni)Model).*Model")
"""Not GPT2LMHeadModel, MarianMTModel, InternVLChatModel and so on, which have a head for text."""
_HEAD = ("score.", "classifier.")
_BODY = ("layers.", "embed_tokens.", "norm.")
"""Prefixes in checkpoints that were saved without their head: names lack their first part."""
_VOCABULARY = ("lm_head.weight", "model.embed_tokens.weight")
_ACTIVATIONS = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax", "Tanh": "tanh"}
_QWEN_STEP_TAG = 151651
"""The step tag of Qwen2.5-Math-PRM, <extra_0>, where its config names none."""


class PooledFiles:
    """`ModelFiles` of `files`, of which `tensors` gives the body; then `pooler` has the rest."""

    def __init__(
        self, files: ModelFiles, options: PoolingOptions, modules: SentenceModules | None
    ) -> None:
        self._files = files
        self._options = options
        self.modules = modules
        self.name, self.path = files.name, files.path
        self.generation_config = files.generation_config
        self.weight_files = files.weight_files
        self.quantised_types = files.quantised_types
        self.given_tokenizer = files.given_tokenizer
        self.mmproj = files.mmproj
        self.config = files.config | options.overrides
        names = self.config.get("architectures") or [""]
        self._architecture = str(names[0] if isinstance(names, list) else names)
        self._is_decoder = self.config.get("use_bidirectional_attention") is True
        self.is_encoder = self._is_decoder or bool(_ENCODER.fullmatch(self._architecture))
        if self.is_encoder:  # T5's has the whole model's config
            self.config.pop("is_encoder_decoder", None)
        is_classifier = self._architecture.endswith(_CLASSIFIERS)
        is_classifier |= self.is_encoder and "TokenClassification" in self._architecture
        has_decoder = bool(self.config.get("is_encoder_decoder"))
        is_headless = is_classifier or self.is_encoder
        is_headless |= not has_decoder and _HEADLESS.fullmatch(self._architecture) is not None
        is_made_for_it = is_headless or bool(modules)
        pools_only = options.runner == "pooling" or (options.runner == "auto" and is_made_for_it)
        if options.runner == "generate" and is_headless:
            raise ConfigurationError(
                f"--runner generate: {self._architecture} has no head for text; use auto or pooling"
            )
        self.generates = not pools_only
        self.convert = options.convert
        if options.convert == "auto":
            self.convert = "embed" if pools_only else "none"
            if is_classifier:
                self.convert = "classify"
        if self.convert == "none" and pools_only:
            raise ConfigurationError("--runner pooling with --convert none serves nothing; omit it")
        if self.convert != "none" and has_decoder:
            raise StartupError(
                f"{files.name} ({self._architecture}) is an encoder-decoder model, of which "
                "nothing is pooled here; serve it without --runner and --convert, or serve another"
            )
        if pools_only:
            self.config["tie_word_embeddings"] = True  # so no head is missed
        if self.convert != "none" and self.config.get("is_causal") is False:
            raise StartupError(
                f"{files.name} attends in both directions (is_causal is false), which is not "
                "supported for decoders; serve another model"
            )
        if "jina_task" in options.overrides and not files.config.get("lora_adaptations"):
            raise ConfigurationError(
                f"--hf-overrides: jina_task is of jina-embeddings v3, {files.name} has no tasks; "
                "omit it"
            )
        self._taken: dict[str, WeightPart] = {}

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._files.eos_token_ids

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the files, and of how the model is pooled."""
        if self.convert == "none":
            return self._files.fingerprint
        parts = [self._files.fingerprint, self.generates, self.convert]
        parts += [self._options.overrides, self._options.pooler_fields]
        text = json.dumps(parts, sort_keys=True).encode()
        size = len(self._files.fingerprint) // 2
        return hashlib.blake2b(text, digest_size=min(size, 64)).hexdigest()

    @property
    def num_weights(self) -> int:
        return self._files.num_weights

    @property
    def max_seq_length(self) -> int | None:
        """Most tokens of a text, as sentence-transformers' files say, if the model only pools."""
        return None if self.generates or self.modules is None else self.modules.max_seq_length

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels, by the config's `id2label`."""
        named = self.config.get("id2label") or {}
        return tuple(str(named[key]) for key in sorted(named, key=int))

    def tokenizer(self) -> TokenizerFiles | None:
        return self._files.tokenizer()

    def tensors(self, *, keeps_blocks: bool = False) -> "Iterator[tuple[str, WeightPart]]":
        from_tokens = self.config.get("classifier_from_token")
        for name, tensor in self._files.tensors(keeps_blocks=keeps_blocks):
            if self.convert == "none" or (self.is_encoder and not self._is_decoder):
                yield name, tensor
                continue
            name = f"model.{name}" if name.startswith(_BODY) else name
            if name.startswith(_HEAD) or (from_tokens and name in _VOCABULARY):
                self._taken[name] = tensor
            if not name.startswith(_HEAD) and (self.generates or "lm_head." not in name):
                yield name, tensor

    # ------------------------------------------------------------------ the pooler

    def pooler(self, model: "Model") -> "Pooler | None":
        """The pooler of the model that `tensors` has become. None: nothing is pooled.
        Raises StartupError: there is no head of a kind that is known."""
        if self.convert == "none":
            return None
        from engine_core.model_runner.pooling import Pooler

        if self.is_encoder:
            return self._encoder_pooler(model)
        head = self._head() if self.convert == "classify" else []
        size = model.spec.hidden_size
        self._taken.clear()
        projection = self._projection()
        num_labels = len(head[-1].weight_OI) if head else 0
        config = self._pooler_config(size, num_labels)
        return Pooler(_sized(config, projection), head, projection)

    def _projection(self) -> "list[DenseLayer]":
        return [_dense_module(folder) for folder in self.modules.dense] if self.modules else []

    def _encoder_pooler(self, model: "Model") -> "Pooler":
        from engine_core.model_runner.pooling import Pooler
        from engine_core.models.encoders.encoder import Encoder

        projection = self._projection()
        size = model.spec.hidden_size
        if self.convert != "classify":
            if self._architecture == BGE_M3:
                return self._bge_m3_pooler(size)
            config = self._pooler_config(size, 0, PoolingType.MEAN)
            return Pooler(_sized(config, projection), (), projection)
        if not isinstance(model, Encoder) or model.head is None:
            raise StartupError(
                f"{self.name} ({self._architecture}) has no head to classify with; use --convert "
                "embed"
            )
        head = model.head.config
        default = PoolingType.MEAN if head.pooling == "mean" else PoolingType.CLS
        config = self._pooler_config(size, head.num_labels, default)
        tasks: tuple[PoolingTask, ...] = (PoolingTask.TOKEN_CLASSIFY,)
        if head.pooling != "tokens":
            tasks = (PoolingTask.CLASSIFY,)
            tasks += (PoolingTask.SCORE,) * (head.num_labels == 1)
        return Pooler(dataclasses.replace(config, tasks=tasks), [model.label], projection)

    def _bge_m3_pooler(self, size: int) -> "Pooler":
        """The first token's vector, and by files of its own weights and vectors of tokens."""
        from engine_core.model_runner.pooling import Pooler

        weights, vectors = (
            _linear_layer(self.path, (f"{name}_linear.pt",), "", "identity")
            for name in ("sparse", "colbert")
        )
        special = self.config.get("bos_token_id", 0), self.config.get("eos_token_id", 2)
        config = dataclasses.replace(
            self._pooler_config(size, 0, PoolingType.CLS),
            tasks=(PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY),
            num_labels=1,
            label_activation="relu",
            special_token_ids=special,
        )
        return Pooler(config, [weights], (), [vectors])

    def _pooler_config(
        self, embedding_size: int, num_labels: int, default: PoolingType = PoolingType.LAST
    ) -> PoolerConfig:
        fields, modules, config = self._options.pooler_fields, self.modules, self.config
        tasks: tuple[PoolingTask, ...] = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
        is_step = self._architecture.endswith("ForProcessRewardModel")
        if num_labels:
            tasks = (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY)
            if num_labels == 1:
                tasks += (PoolingTask.SCORE,)
            if self._architecture.endswith("RewardModel"):
                tasks = (PoolingTask.TOKEN_CLASSIFY,)
        tags = {"step_tag_id": _QWEN_STEP_TAG} if is_step else {}
        kinds = {PoolingType.LAST, PoolingType.MEAN, PoolingType.CLS}
        wanted = fields.get("pooling_type")
        seq = fields.get("seq_pooling_type") or (wanted if wanted in kinds else None)
        tok = fields.get("tok_pooling_type") or (None if wanted in kinds else wanted)
        try:
            seq = PoolingType(seq or (modules and modules.pooling_type) or default)
            tok = PoolingType(tok or (PoolingType.STEP if is_step else PoolingType.ALL))
        except ValueError as error:
            raise ConfigurationError(
                f"--pooler-config: {error}; there is {', '.join(PoolingType)}"
            ) from error
        if seq not in kinds or tok in kinds:
            raise ConfigurationError(
                f"--pooler-config: seq_pooling_type {seq} and tok_pooling_type {tok}; the first is "
                "one of LAST, MEAN and CLS, the second ALL or STEP"
            )
        returned = fields.get("returned_token_ids", ())
        if wrong := [at for at in returned if not 0 <= at < num_labels]:
            raise ConfigurationError(
                f"--pooler-config: returned_token_ids holds {wrong[0]}, and this model has "
                f"{num_labels} labels, the first is 0; name others"
            )
        dimensions = config.get("matryoshka_dimensions")
        is_matryoshka = bool(dimensions or config.get("is_matryoshka"))
        hidden_size = size_in(config, "hidden_size") or embedding_size
        normalizes = True if modules is None or num_labels else modules.normalizes
        return PoolerConfig(
            tasks=tasks,
            hidden_size=hidden_size,
            vector_size=hidden_size,
            seq_pooling_type=seq,
            tok_pooling_type=tok,
            use_activation=fields.get("use_activation", normalizes),
            num_labels=num_labels,
            label_activation=self._label_activation(num_labels),
            step_tag_id=(tags | fields).get("step_tag_id"),
            returned_token_ids=tuple(returned),
            matryoshka_dimensions=tuple(dimensions or ()) if is_matryoshka else None,
        )

    def _label_activation(self, num_labels: int) -> str:
        """The activation of logits, as transformers' loss takes `problem_type`; a cross-encoder of
        sentence-transformers names its own."""
        config = self.config
        named = (config.get("sentence_transformers") or {}).get("activation_fn")
        if named := named or config.get("sbert_ce_default_activation_function"):
            return _activation(named)
        by_problem = {"regression": "identity", "multi_label_classification": "sigmoid"}
        default = "softmax" if num_labels > 1 else "sigmoid"
        return by_problem.get(config.get("problem_type") or "", default)

    def _head(self) -> "list[DenseLayer]":
        from engine_core.model_runner.pooling import DenseLayer

        taken = {name: _as_float32(name, part) for name, part in self._taken.items()}
        if tokens := self.config.get("classifier_from_token"):
            return [DenseLayer(self._rows_of_tokens(tokens, taken))]
        for stem in ("score", "classifier"):
            if (weight := taken.get(f"{stem}.weight")) is not None:
                return [DenseLayer(weight, taken.get(f"{stem}.bias"))]
        if "score.0.weight" in taken and "score.2.weight" in taken:
            first = DenseLayer(taken["score.0.weight"], taken.get("score.0.bias"), "relu")
            return [first, DenseLayer(taken["score.2.weight"], taken.get("score.2.bias"))]
        raise StartupError(
            f"{self.name} has no head to classify with (score.weight), it holds "
            f"{', '.join(sorted(taken)) or 'none'}; use --convert embed, or name tokens with "
            '--hf-overrides \'{"classifier_from_token": ["no", "yes"]}\''
        )

    def _rows_of_tokens(
        self, tokens: list[str], taken: "dict[str, Float32Array]"
    ) -> "Float32Array":
        """Rows of the head for text; of a reranker that answers with one of two, the second's less
        the first's, which is the logit of their softmax."""
        tokenizer = self.tokenizer()
        document = {} if tokenizer is None else json.loads(tokenizer.tokenizer_json)
        ids = []
        for token in tokens:
            if not document or (number := token_id(document, token)) is None:
                raise ConfigurationError(
                    f"classifier_from_token: {token!r} is no token of this model; name others"
                )
            ids.append(number)
        is_tied = self._files.config.get("tie_word_embeddings") or "lm_head.weight" not in taken
        rows = taken["model.embed_tokens.weight" if is_tied else "lm_head.weight"][ids]
        method = self.config.get("method")
        if method == "from_2_way_softmax" or self.config.get("is_original_qwen3_reranker"):
            if len(tokens) != 2:
                raise ConfigurationError(
                    f"classifier_from_token names {len(tokens)} tokens, from_2_way_softmax takes 2"
                )
            return rows[1:2] - rows[0:1]
        return rows


def pooled_files(files: ModelFiles, options: PoolingOptions) -> PooledFiles:
    """Raises ConfigurationError, StartupError: options or files ask for what cannot be done."""
    folder, modules = files.path, None
    if not folder.is_dir() and "pooling_type" in files.config:  # a GGUF file, which says no more
        modules = SentenceModules(PoolingType(files.config["pooling_type"]))
    elif (folder / "modules.json").is_file():
        modules = read_modules(folder)
    return PooledFiles(files, options, modules)


def _sized(config: PoolerConfig, projection: "list[DenseLayer]") -> PoolerConfig:
    """The config with the size of what the projection makes, if there is one."""
    if not projection:
        return config
    return dataclasses.replace(config, vector_size=len(projection[-1].weight_OI))


def _dense_module(folder: Path) -> "DenseLayer":
    config = read_json_object_if_present(folder / "config.json")
    activation = _activation(config.get("activation_function") or "Tanh")
    return _linear_layer(folder, ("model.safetensors", "pytorch_model.bin"), "linear.", activation)


def _linear_layer(
    folder: Path, names: tuple[str, ...], prefix: str, activation: str
) -> "DenseLayer":
    from engine_core.model_files.linear_file import read_linear
    from engine_core.model_runner.pooling import DenseLayer

    weight, bias = read_linear(folder, names, prefix)
    return DenseLayer(weight.numpy(), None if bias is None else bias.numpy(), activation)


def _activation(name: str) -> str:
    """Name of the activation that a class of torch.nn stands for."""
    if (known := _ACTIVATIONS.get(name.rsplit(".", 1)[-1])) is None:
        raise StartupError(
            f"activation {name} is not supported; there is {', '.join(_ACTIVATIONS)}"
        )
    return known


def _as_float32(name: str, part: "WeightPart") -> "Float32Array":
    import torch

    if not isinstance(part, torch.Tensor):
        raise StartupError(f"{name} is quantised, which is not supported; use the original weights")
    array: Float32Array = part.float().numpy()
    return array
