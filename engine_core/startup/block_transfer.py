"""Opens the exchange of KV blocks with other engines: what both must agree in, sockets, threads."""

import torch

from engine_core.block_transfer import BlockMemory, Fetches, TransferStore
from engine_core.block_transfer.fetcher import BlockFetcher
from engine_core.block_transfer.server import BlockServer
from engine_core.errors import AddressInUse, ConfigurationError
from engine_core.model_files import ModelFiles
from engine_core.model_runner.config import RunnerConfig
from engine_core.options.engine import EngineOptions
from engine_core.server.keys import KeyFolder
from engine_core.server.transport import ZmqTransport
from engine_core.startup.model import LoadedModel
from engine_core.startup.prefix_store import cache_key
from protocol.addresses import check_address
from protocol.errors import InvalidParameter
from protocol.keys import ClientKey, read_secret_file
from protocol.outputs import DisaggregationInfo

_LEAST_BLOCKS = 16
_ANY_HOST = ("0.0.0.0", "*", "[::]")


def open_block_transfer(
    options: EngineOptions, files: ModelFiles, loaded: LoadedModel, runner: RunnerConfig
) -> TransferStore | None:
    """None if it was not asked for.
    Raises ConfigurationError: an address, a key or a size cannot be used."""
    own = options.disaggregation
    if own.disaggregation_mode is None:
        return None
    layout = runner.layout
    if own.buffer_bytes < _LEAST_BLOCKS * layout.block_bytes:
        raise ConfigurationError(
            f"--kv-transfer-buffer is {own.buffer_bytes} bytes, a block takes {layout.block_bytes};"
            f" give room for at least {_LEAST_BLOCKS} blocks"
        )
    capability = torch.backends.cpu.get_cpu_capability()
    key = cache_key(options, files, loaded, runner, instruction_set=capability)
    memory = BlockMemory(limit_bytes=own.buffer_bytes, block_bytes=layout.block_bytes)
    if own.disaggregation_mode == "prefill":
        assert own.kv_transfer_bind is not None
        _check("--kv-transfer-bind", own.kv_transfer_bind)
        keys = None if own.kv_transfer_keys is None else KeyFolder(own.kv_transfer_keys)
        try:
            transport = ZmqTransport(own.kv_transfer_bind, keys=keys)
        except (AddressInUse, ConfigurationError) as error:
            why = str(error).replace("--bind", "--kv-transfer-bind")
            raise type(error)(why.replace("--keys", "--kv-transfer-keys")) from None
        store = TransferStore(memory, keeps=True)
        store.server = BlockServer(transport, memory, key=key)
        return store
    for source in own.kv_transfer_source:
        _check("--kv-transfer-source", source)
    client_key = None
    if own.kv_transfer_key is not None:
        try:
            client_key = read_secret_file(own.kv_transfer_key, ClientKey)
        except InvalidParameter as error:
            raise ConfigurationError(f"--kv-transfer-key: {error}") from None
    store = TransferStore(memory, keeps=False)
    fetches = Fetches(key=key, group_bytes=layout.group_bytes, timeout_s=own.timeout_s)
    store.fetcher = BlockFetcher(
        fetches,
        sources=own.kv_transfer_source,
        key=client_key,
        block_bytes=layout.block_bytes,
        on_block=store.on_block,
        on_end=store.on_end,
    )
    return store


def disaggregation_info(
    options: EngineOptions, store: TransferStore | None
) -> DisaggregationInfo | None:
    """The handshake's facts on disaggregation; None: this engine does none."""
    own = options.disaggregation
    if own.disaggregation_mode is None or store is None:
        return None
    address = None if store.server is None else store.server.address
    return DisaggregationInfo(own.disaggregation_mode, address, own.kv_transfer_source)


def _check(option: str, address: str) -> None:
    try:
        check_address(address)
    except InvalidParameter as error:
        raise ConfigurationError(f"{option}: {error}") from None
    host = address.removeprefix("tcp://").rpartition(":")[0]
    if address.startswith("tcp://") and host in _ANY_HOST:
        raise ConfigurationError(
            f"{option} is {address}: give the address under which other engines reach this one, as "
            "clients are told it"
        )
