"""`engine-client http` and `engine-client serve`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence

from frontend.async_llm import AsyncLLM
from frontend.cli.options import EXIT_ADDRESS, DaemonOptions, UsageError, print_fault
from frontend.daemon import ChildDaemon
from frontend.errors import InvalidInput
from frontend.http.listeners import AddressUnavailable
from frontend.http.on_demand import DaemonPool, OnDemandModel
from frontend.http.on_demand_options import OnDemandOptions
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
        models: NAME=ADDRESS each; several names of one address are names of one model. A NAME
            alone is one whose daemon is started.
        served_names: of the model at the daemon's address, instead of its own.

    Raises:
        UsageError: one of them is not that, or the settings contradict each other.
    """
    names: dict[str | None, list[str]] = {}
    taken_names: list[str] = []
    pool = DaemonPool(started)
    for model in models:
        name, equals, address = model.partition("=")
        if not name or (equals and not address):
            raise UsageError(f"--model is {model!r}, it must be NAME=ADDRESS or NAME")
        if not equals:
            (name,) = OnDemandModel(model, pool).names
        if name in taken_names:
            raise UsageError(f"--model {name} is given twice; give each engine its own name")
        taken_names.append(name)
        if not equals:
            continue
        if "," in address:
            raise UsageError(
                f"--model {name} has several addresses, it may have one; omit the rest"
            )
        try:
            check_address(address)
        except InvalidParameter as error:
            raise UsageError(f"--model {name}: {error}") from None
        names.setdefault(address, []).append(name)
    if started.engine_options and not pool.models:
        raise UsageError(
            f"unknown option {started.engine_options[0]!r}; options of daemons need a --model NAME "
            "that is started"
        )
    if models and served_names:
        raise UsageError("--served-model-name is for --address; --model has the name already")
    if not models:
        names[daemon.address] = list(served_names)
    connected = [
        ServedModel(
            functools.partial(dataclasses.replace(daemon, address=address).client, "http"), each
        )
        for address, each in names.items()
    ]
    served = ServedModels([*connected, *pool.models])

    async def start() -> Backend:
        return Backend(served)

    return _serve(settings, start)


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
