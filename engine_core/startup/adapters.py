"""Room for adapters beside the model, and the adapters that the operator named."""

from collections.abc import Callable
from pathlib import Path

from engine_core.adapters.adapter import AdapterTargets, read_adapter
from engine_core.adapters.errors import AdapterError
from engine_core.adapters.host import Adapters
from engine_core.adapters.pool import AdapterPool
from engine_core.errors import ConfigurationError, StartupError
from engine_core.models.decoder import decoder_of
from engine_core.options.adapters import AdapterOptions
from engine_core.scheduler import Scheduler
from engine_core.startup.model import LoadedModel
from protocol.calls import AdapterInfo


def make_adapter_pool(
    options: AdapterOptions, loaded: LoadedModel, max_num_tokens: int
) -> AdapterPool | None:
    """None unless adapters are asked for.
    Raises StartupError: one of them cannot be served with this model."""
    if not options.is_enabled:
        return None
    model = decoder_of(loaded.model, "adapters")
    targets, largest = AdapterTargets.of_model(model), 0
    if options.max_lora_rank is None:
        for name, path in options.by_name().items():
            try:
                largest = max(largest, read_adapter(path, targets, max_rank=None).rank)
            except AdapterError as error:
                raise StartupError(f"--adapter {name}: {error}") from error
    return AdapterPool(
        model,
        loaded.ops,
        num_slots=options.num_slots,
        max_rank=options.rank_for(largest),
        max_num_tokens=max_num_tokens,
        dtype=loaded.dtype,
    )


def open_adapters(
    options: AdapterOptions,
    pool: AdapterPool | None,
    scheduler: Scheduler,
    base: str,
    on_change: Callable[[tuple[AdapterInfo, ...]], None],
) -> Adapters | None:
    """Those that the operator named, read and checked.
    Raises StartupError: as `make_adapter_pool`, or no such folder to load others from."""
    if pool is None:
        return None
    folder: Path | None = options.adapter_dir
    if folder is not None and not folder.is_dir():
        raise ConfigurationError(f"--adapter-dir: there is no folder {folder}; make it first")
    adapters = Adapters(pool, scheduler, base=base, folder=folder, on_change=on_change)
    for name, path in options.by_name().items():
        try:
            adapters.add(name, path)
        except AdapterError as error:
            raise StartupError(f"--adapter {name}: {error}") from error
    return adapters
