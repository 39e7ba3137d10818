"""The model behind an executor while the engine serves: given back, loaded again, exchanged."""

import contextlib
import ctypes
import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator

import torch

from engine_core.errors import RequestRefused, StartupError
from engine_core.executor import InProcessExecutor
from engine_core.model_files import ModelFiles, ModelFilesError, open_model_files
from engine_core.model_runner.cache import BlockStorage, DiskStore
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.encoder_runner import EncoderRunner
from engine_core.models.config import ModelConfig
from engine_core.models.encoders.encoder_configs import EncoderConfig
from engine_core.models.errors import ModelError
from engine_core.models.interface import CapturesPasses
from engine_core.models.registry import read_model_config
from engine_core.startup.cache_pages import end_taking
from engine_core.startup.config import EngineConfig
from engine_core.startup.draft_model import load_with_draft
from engine_core.startup.model import LoadedModel
from engine_core.startup.pooled_files import pooled_files
from engine_core.startup.runner_spec import Runner, RunnerSpec
from protocol.errors import ErrorCode

logger = logging.getLogger(__name__)

_MOST_DIFFERENCES = 4


class LocalModelHost:
    """A `ModelHost`. The weights are those of `spec` until `update`.

    Args:
        files: that they were loaded from. Not kept, as they map whole models.
        executor: runs `runner`, which `spec` has built.
        store: blocks on disk or from other engines, of all weights: their hashes differ.
    """

    def __init__(
        self,
        spec: RunnerSpec,
        config: EngineConfig,
        files: ModelFiles,
        executor: InProcessExecutor,
        runner: Runner,
        store: DiskStore | None,
    ) -> None:
        self.fingerprint = files.fingerprint
        self.keeps_cache = not spec.on_device
        self._spec: RunnerSpec | None = spec
        """None while the weights are given back."""
        self._make_spec = _maker_of(spec)
        self._adapters = spec.config.adapters
        self._runner: Runner | None = runner
        self._executor = executor
        self._store = store
        self._config = config
        self._options = spec.options
        self._collectives = spec.loaded.collectives
        self._device = spec.loaded.ops.device
        self._traits = spec.loaded.traits
        self._model = self._options.model
        self._weights, self._dtype = spec.loaded.weights, spec.loaded.numbers.name
        self._quantised_types = files.quantised_types
        self._shape: dict[str, object] = {}
        """Empty: not our own model code, which alone can be given back and exchanged."""
        if "sleep" in spec.loaded.model.supports:
            self._shape = _facts(read_model_config(files.config))
        self._opened: tuple[str, ModelFiles] | None = None

    def check_sleep(self, level: int) -> None:
        self._check_model("sleep")
        if level == 1 and not self._traits.is_host:
            raise RequestRefused(
                ErrorCode.NOT_SUPPORTED,
                "sleep(level=1) keeps the weights in this machine's memory, which is not "
                "supported on a GPU; use level=2, which reads them from the model's files again",
            )
        if level == 2 and self._model is None:
            raise RequestRefused(
                ErrorCode.NOT_SUPPORTED,
                "sleep(level=2) drops the weights, and random ones come from no files; use level=1",
            )

    def release(self, *, weights: bool) -> None:
        self._runner = self._executor.runner = None
        if self._spec is not None:
            loaded = self._spec.loaded
            for model in (loaded.model, None if loaded.draft is None else loaded.draft.model):
                if isinstance(model, CapturesPasses):
                    model.forget_caches()
            del model, loaded
        if weights:
            if self._adapters is not None:
                self._adapters.detach()
            self._spec = None
        _give_back_memory(on_gpu=not self._traits.is_host)

    def restore(self) -> None:
        with _refusals():
            if self._spec is None:
                assert self._model is not None, "check_sleep was not called"
                files = self._open(self._model)
                if files.fingerprint != self.fingerprint:
                    raise RequestRefused(
                        ErrorCode.WEIGHTS_REFUSED,
                        f"the files of {self._model} are not those that were loaded; put those "
                        "back, or call update_weights to serve these",
                    )
                self._run(self._make_spec(self._load(files)))
            else:
                self._run(self._spec)

    def open(self, model: str) -> str:
        self._check_model("update_weights")
        with _refusals():
            files = self._open(model)
            self._opened = model, files
            return files.fingerprint

    def update(self) -> None:
        assert self._opened is not None, "open was not called"
        (model, files), self._opened = self._opened, None
        old, is_awake = self._spec, self._runner is not None
        if is_awake and not self.keeps_cache:
            self.release(weights=False)  # room for both
        try:
            with _refusals():
                self._spec = self._make_spec(self._load(files))
                if self._runner is not None:
                    assert not isinstance(self._runner, EncoderRunner)
                    self._run(self._spec, self._runner.storage)
        except RequestRefused:
            self._spec = old
            if is_awake and self._runner is None:
                assert old is not None
                self._run(old)
            raise
        del old
        self.fingerprint, self._model = files.fingerprint, model
        if is_awake and not self.keeps_cache:
            self._run(self._spec)
        _give_back_memory(on_gpu=not self._traits.is_host)

    # ------------------------------------------------------------------ parts of these

    def _check_model(self, what: str) -> None:
        if isinstance(self._runner, EncoderRunner):
            raise RequestRefused(
                ErrorCode.NOT_SUPPORTED,
                f"{what} is not supported for {self._config.architecture}, an encoder-only model; "
                "start the engine again instead",
            )
        if not self._shape:
            raise RequestRefused(
                ErrorCode.NOT_SUPPORTED,
                f"{what} is not supported for {self._config.architecture} through transformers' "
                "model code; start the engine again instead",
            )

    def _run(self, spec: RunnerSpec, storage: BlockStorage | None = None) -> None:
        if self._adapters is not None:
            self._adapters.attach(spec.loaded.model)
        runner = spec.build(
            num_blocks=self._config.num_blocks,
            num_host_blocks=self._config.num_host_blocks,
            max_model_len=self._config.scheduler.max_model_len,
            storage=storage,
        )
        if self._store is not None:
            assert not isinstance(runner, EncoderRunner)
            runner.storage.attach_disk(self._store)
        spec.warm_up(runner)
        self._spec, self._runner, self._executor.runner = spec, runner, runner

    def _open(self, model: str) -> ModelFiles:
        """Raises RequestRefused: of another shape or format than the model that is served."""
        files = pooled_files(open_model_files(model, report=logger.info), self._options.pooling)
        shape = _facts(read_model_config(files.config))
        differences = [
            f"{name} is {shape.get(name)!s:.80}, not {value!s:.80}"
            for name, value in self._shape.items()
            if shape.get(name) != value
        ]
        if files.quantised_types != self._quantised_types:
            ours, theirs = self._quantised_types, files.quantised_types
            differences.insert(0, f"quantised types are {sorted(theirs)}, not {sorted(ours)}")
        if differences:
            what = "; ".join(differences[:_MOST_DIFFERENCES])
            raise RequestRefused(
                ErrorCode.WEIGHTS_REFUSED,
                f"{model} is another model than the one that is served: {what}; give weights of "
                "the same shape and format, or start another engine",
            )
        return files

    def _load(self, files: ModelFiles) -> LoadedModel:
        options = self._options
        if not files.quantised_types:  # else a named dtype would undo the blocks
            options = dataclasses.replace(options, dtype=self._dtype)
        loaded = load_with_draft(options, files, self._device, self._collectives)
        if loaded.weights != self._weights:
            raise RequestRefused(
                ErrorCode.WEIGHTS_REFUSED,
                f"the weights of {files.name} are {loaded.weights}, those that are served "
                f"{self._weights}; give weights of the same format",
            )
        return loaded


def _maker_of(spec: RunnerSpec) -> Callable[[LoadedModel], RunnerSpec]:
    """Makes a like spec of another model, and keeps nothing of this one."""
    kept = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    sizes = {
        field.name: getattr(spec.config, field.name) for field in dataclasses.fields(spec.config)
    }
    del kept["loaded"], kept["config"], sizes["model"], sizes["ops"], sizes["draft"]
    del sizes["pooler"], sizes["encoder"]
    return lambda loaded: RunnerSpec(
        loaded=loaded,
        config=RunnerConfig(
            model=loaded.model,
            ops=loaded.ops,
            draft=loaded.draft,
            encoder=loaded.encoder,
            pooler=loaded.pooler,
            **sizes,
        ),
        **kept,
    )


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What can be wrong with files and memory refuses the call, not the engine."""
    try:
        yield
    except (ModelFilesError, ModelError, StartupError, OSError) as error:
        raise RequestRefused(ErrorCode.WEIGHTS_REFUSED, str(error)) from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        reason = str(error).split(". ", 1)[0]
        raise RequestRefused(
            ErrorCode.WEIGHTS_REFUSED,
            f"there is not enough memory ({reason}); free some and call again",
        ) from error
    except (LookupError, RuntimeError, TypeError, ValueError) as error:  # files hold anything
        logger.exception("these weights are refused")
        raise RequestRefused(
            ErrorCode.WEIGHTS_REFUSED,
            f"these weights cannot be served: {type(error).__name__}: {error}; check their files",
        ) from error


def _give_back_memory(*, on_gpu: bool) -> None:
    """Give freed memory back to the system."""
    gc.collect()  # what is captured of a model's forward pass refers to the model
    end_taking()
    if on_gpu:
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it, and needs it
        ctypes.CDLL(None).malloc_trim(0)


def _facts(shape: ModelConfig | EncoderConfig) -> dict[str, object]:
    """A model's shape by the names of its parts; what each layer has of its own is a part."""
    facts: dict[str, object] = {"num_layers": shape.spec.num_layers}
    for part in (shape.spec, shape):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, tuple):
                facts |= {f"{field.name}[{layer}]": each for layer, each in enumerate(value)}
            elif value is not shape.spec:
                facts[field.name] = value
    return facts
