"""`engine-client http` and `engine-client serve`."""

import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from frontend.async_llm import AsyncLLM
from frontend.cli.options import EXIT_ADDRESS, DaemonOptions, UsageError, print_fault
from frontend.daemon import ChildDaemon
from frontend.errors import InvalidInput
from frontend.http.listeners import AddressUnavailable
from frontend.http.on_demand.model import DaemonPool, OnDemandModel
from frontend.http.on_demand.options import OnDemandOptions
from frontend.http.served_models import ServedModel, ServedModels
from frontend.http.server import Backend, serve
from frontend.http.settings import ServerSettings
from protocol.addresses import check_address
from protocol.errors import InvalidParameter
from protocol.outputs import ModelInfo


def run_http(
    daemon: DaemonOptions,
    settings: ServerSettings,
    models: Sequence[str],
    served_names: Sequence[str],
    started: OnDemandOptions,
) -> int:
    """
    Args:
        models: NAME=ADDRESS,ADDRESS... each; a NAME that is repeated has more addresses. Several
            names of the same addresses are names of one model. A NAME alone is started.
        served_names: of the model at the daemon's address, instead of its own.

    Raises:
        UsageError: one of them is not that, or the settings contradict each other.
    """
    try:
        started.check()
    except InvalidInput as error:
        raise UsageError(str(error)) from None
    if models and served_names:
        raise UsageError("--served-model-name is for --address; --model has the name already")
    names = _names_by_addresses([each for each in models if "=" in each])
    pool = DaemonPool(started)
    for model in models:
        if "=" not in model:
            OnDemandModel(model, pool)
    if started.engine_options and not pool.models:
        raise UsageError(
            f"unknown option {started.engine_options[0]!r}; options of daemons need a --model NAME "
            "without an address"
        )
    if not models:
        names[()] = list(served_names)
    served = ServedModels(
        [
            *(
                ServedModel(functools.partial(daemon.client, "http", addresses), each)
                for addresses, each in names.items()
            ),
            *pool.models,
        ]
    )
    for name, count in Counter(served.names()).items():
        if count > 1:
            raise UsageError(f"--model {name} is given twice; give each engine its own name")

    async def start() -> Backend:
        return Backend(served)

    return _serve(settings, start)


def _names_by_addresses(models: Sequence[str]) -> dict[tuple[str, ...], list[str]]:
    """Raises UsageError: see `run_http`."""
    addresses: dict[str, list[str]] = {}
    for model in models:
        name, _, given = model.partition("=")
        if not name or not given:
            raise UsageError(
                f"--model is {model!r}, it must be NAME, NAME=ADDRESS or NAME=ADDRESS,ADDRESS"
            )
        for address in given.split(","):
            try:
                check_address(address)
            except InvalidParameter as error:
                raise UsageError(f"--model {name}: {error}") from None
            if address in addresses.setdefault(name, []):
                raise UsageError(f"--model {name} has {address} twice; omit one")
            addresses[name].append(address)
    names: dict[tuple[str, ...], list[str]] = {}
    for name, each in addresses.items():
        names.setdefault(tuple(sorted(each)), []).append(name)
    for address in (counted := Counter(address for group in names for address in group)):
        if counted[address] > 1:
            raise UsageError(
                f"--model: {address} stands with different others under several names; give all "
                "names of one model the same addresses"
            )
    return names


def run_serve(
    model: str,
    engine_options: Sequence[str],
    settings: ServerSettings,
    served_names: Sequence[str],
    startup_timeout_s: float,
) -> int:
    """A daemon and a server before it: if one of them ends, so does the other.

    Raises:
        UsageError: the settings contradict each other.
        EngineStartError, EngineDied: the daemon did not start, or ended.
    """
    supervision = [] if "--no-supervise" in engine_options else ["--supervise"]
    arguments = ["--model", model, *supervision, *engine_options]

    async def start() -> Backend:
        child = ChildDaemon(arguments, shows_log=True)
        llm = await AsyncLLM.launched(
            child, client_name="engine-client serve", startup_timeout_s=startup_timeout_s
        )
        served = ServedModel(lambda: llm, served_names)
        await served.ready()
        has_key = settings.api_key or settings.api_key_file
        return Backend(
            ServedModels([served]),
            lost=child.wait,
            text=lambda url: _first_steps(url, llm.model, has_key=bool(has_key)),
        )

    return _serve(settings, start)


def _first_steps(url: str, model: ModelInfo, *, has_key: bool) -> str:
    has_template = model.tokenizer is not None and model.tokenizer.chat_template is not None
    path, body = (
        ("chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}')
        if has_template
        else ("completions", '{"prompt": "Once upon a time"}')
    )
    where = f"{url}/v1/{path}"
    if url.startswith("unix://"):
        where = f"--unix-socket {url.removeprefix('unix://')} http://localhost/v1/{path}"
    key = " -H 'authorization: Bearer KEY'" if has_key else ""
    return (
        f"\nServing {model.name} at {url}/v1\n\n"
        f"curl {where} -H 'content-type: application/json'{key} -d '{body}'\n\n"
        "Ctrl-C stops server and daemon."
    )


def _serve(settings: ServerSettings, start: Callable[[], Awaitable[Backend]]) -> int:
    try:
        return serve(settings, start)
    except InvalidInput as error:
        raise UsageError(str(error)) from None
    except AddressUnavailable as error:
        print_fault(error)
        return EXIT_ADDRESS
