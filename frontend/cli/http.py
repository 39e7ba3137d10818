"""`engine-client http` and `engine-client serve`."""

import asyncio
import dataclasses
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from frontend.async_llm import AsyncLLM
from frontend.cli.options import (
    DAEMON,
    EXIT_START,
    DaemonOptions,
    UsageError,
    check_engine_options,
    print_fault,
)
from frontend.engine.daemon import ChildDaemon, start_daemons
from frontend.errors import InvalidInput
from frontend.fleet.router import RoutingPolicy
from frontend.http import server
from frontend.http.listeners import AddressUnavailable
from frontend.http.on_demand.model import DaemonPool, OnDemandModel
from frontend.http.on_demand.options import OnDemandOptions
from frontend.http.served_models import ServedModel, ServedModels
from frontend.http.server import Backend
from frontend.http.settings import ServerSettings
from frontend.http.tools.stream import list_of_formats
from frontend.presets.files import sent_models
from frontend.presets.llm import adapter_options, names_of
from frontend.reasoning_formats import REASONING_FORMATS
from protocol.addresses import check_address
from protocol.errors import InvalidParameter
from protocol.outputs import ModelInfo
from protocol.presets import model_of

_Several = Annotated[list[str] | None, Parameter(negative="")]
Passed = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""An option that is passed on to the daemon."""
_ON_DEMAND = OnDemandOptions()
_SERVER = ServerSettings()


def http(
    *engine_options: Passed,
    model: _Several = None,
    served_model_name: _Several = None,
    routing_policy: RoutingPolicy = "cache-aware",
    started: OnDemandOptions = _ON_DEMAND,
    settings: ServerSettings = _SERVER,
    daemon: DaemonOptions = DAEMON,
) -> int:
    """Several names of the same addresses are names of one model.

    Args:
        engine_options: Other options are those of daemons that are started (`engine-core
            --help-all`).
        model: NAME=ADDRESS of an engine, NAME=ADDRESS,ADDRESS of several that serve one model, or a
            NAME as for `engine-core --model`, whose daemon is started when it is first asked for
            and stopped when it is idle; may be repeated. Default: the engine at --address, under
            its own name.
        served_model_name: The model's name, instead of its own; may be repeated.
        routing_policy: Of several engines of a model, which one gets a request: the one with most
            of its prompt cached and least to do, the one with least to do, or that of its session.

    Raises:
        UsageError: a model that is not that or has a name that nothing is known by, or settings
            that contradict each other.
    """
    if settings.list_parsers:
        print(f"--tool-call-parser\n{list_of_formats()}\n\n--reasoning-parser")  # noqa: T201
        print("\n".join(REASONING_FORMATS))  # noqa: T201
        return 0
    models = model or []
    given = (*engine_options, *_log_options(settings))
    started = dataclasses.replace(started, engine_options=given)
    try:
        started.check()
    except InvalidInput as error:
        raise UsageError(str(error)) from None
    if models and served_model_name:
        raise UsageError("--served-model-name is for --address; --model has the name already")
    names = _names_by_addresses([each for each in models if "=" in each])
    pool = DaemonPool(started, settings.told_formats)
    on_demand = [each for each in models if "=" not in each]
    own = [each for each in on_demand if model_of(each) == each]
    of_presets = {model_of(each) for each in on_demand if each not in own}
    for each in (*own, *sorted(of_presets - {*own})):
        OnDemandModel(each, pool)
    if pool.models:
        for each in {*sent_models()} - {*own, *of_presets}:
            OnDemandModel(each, pool)
    if engine_options and not pool.models:
        raise UsageError(
            f"unknown option {engine_options[0]!r}; options of daemons need a --model NAME "
            "without an address"
        )
    if not models:
        names[()] = list(served_model_name or [])
    served = ServedModels(
        [
            *(
                ServedModel(
                    functools.partial(daemon.client, "http", addresses, routing_policy), each
                )
                for addresses, each in names.items()
            ),
            *pool.models,
        ],
        functools.partial(OnDemandModel, pool=pool) if pool.models else None,
        default=on_demand[0] if len(models) == 1 and of_presets else None,
    )
    for name, count in Counter(served.names()).items():
        if count > 1:
            raise UsageError(f"--model {name} is given twice; give each engine its own name")
    check_engine_options(engine_options, started.command, on_demand)

    async def start() -> Backend:
        return Backend(served)

    return _serve(settings, start)


def _names_by_addresses(models: Sequence[str]) -> dict[tuple[str, ...], list[str]]:
    """Raises UsageError: see `http`."""
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


def serve(
    model: str | None = None,
    /,
    *engine_options: Passed,
    served_model_name: _Several = None,
    data_parallel_size: Annotated[int, Parameter(alias="-dp")] = 1,
    startup_timeout: float = 3600.0,
    settings: ServerSettings = _SERVER,
) -> int:
    """If one of them ends, so does the other.

    Args:
        model: A folder, file, known name or hub id, as for `engine-core --model`, or a name of
            your own (`engine-core create`).
        engine_options: Other options are the daemon's (`engine-core --help-all`). It is started
            again when it dies, but for --no-supervise.
        served_model_name: The model's name, instead of its own; may be repeated.
        data_parallel_size: So many daemons share the machine; requests go where most of their
            prompt is cached and least is to do.
        startup_timeout: Seconds for the daemon to get ready, downloads included.

    Raises:
        UsageError: no model, or the settings contradict each other.
        EngineStartError, EngineDied: the daemon did not start, or ended.
    """
    if model is None or model.startswith("-"):
        raise UsageError(
            "there is no MODEL; give one first, as `serve smollm2-135m-instruct`, or have several "
            "started when they are asked for: `engine-client http --model NAME --model NAME`"
        )
    source = model_of(model)
    default = None if source == model else model
    supervision = [] if "--no-supervise" in engine_options else ["--supervise"]
    arguments = ["--model", source, *supervision, *adapter_options(source)]
    arguments += [*engine_options, *_log_options(settings)]

    async def start() -> Backend:
        children = start_daemons(arguments, data_parallel_size, shows_log=True)
        llm = await AsyncLLM.launched(
            *children, client_name="engine-client serve", startup_timeout_s=startup_timeout
        )
        # a known name is what its user will ask for; of a path the model's own name is
        names = served_model_name or [llm.model.name if Path(source).exists() else source]
        served = ServedModel(lambda: llm, names)
        served.asked += names_of(source)
        await served.ready()
        has_key = settings.api_key or settings.api_key_file
        return Backend(
            ServedModels([served], default=default),
            lost=functools.partial(_first_end, children),
            text=lambda url: _first_steps(
                default or names[0], url, llm.model, settings, has_key=bool(has_key)
            ),
        )

    return _serve(settings, start)


def _log_options(settings: ServerSettings) -> list[str]:
    return [] if settings.log_format == "text" else ["--log-format", settings.log_format]


async def _first_end(children: Sequence[ChildDaemon]) -> str:
    for first in asyncio.as_completed([each.wait() for each in children]):
        return await first
    raise AssertionError("no daemons")


def _first_steps(
    name: str, url: str, model: ModelInfo, settings: ServerSettings, *, has_key: bool
) -> str:
    has_template = model.tokenizer is not None and model.tokenizer.chat_template is not None
    path, body = (
        ("chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}')
        if has_template
        else ("completions", '{"prompt": "Once upon a time"}')
    )
    where = f"{url}/v1/{path}"
    if url.startswith("unix://"):
        where = f"--unix-socket {url.removeprefix('unix://')} http://localhost/v1/{path}"
    told = settings.told_formats(model)
    formats = f"{told}\n\n" if told else ""
    key = " -H 'authorization: Bearer KEY'" if has_key else ""
    return (
        f"\nServing {name} at {url}/v1{server.and_page(url)}\n\n"
        f"{formats}curl {where} -H 'content-type: application/json'{key} -d '{body}'\n\n"
        "Ctrl-C stops server and daemon."
    )


def _serve(settings: ServerSettings, start: Callable[[], Awaitable[Backend]]) -> int:
    try:
        return server.serve(settings, start)
    except InvalidInput as error:
        raise UsageError(str(error)) from None
    except AddressUnavailable as error:
        print_fault(error)
        return EXIT_START
