"""`engine-client http`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from frontend.cli.options import EXIT_ADDRESS, DaemonOptions, UsageError, print_fault
from frontend.errors import InvalidInput
from frontend.http.listeners import AddressUnavailable
from frontend.http.served_models import ServedModel, ServedModels
from frontend.http.server import serve
from frontend.http.settings import ServerSettings
from protocol.addresses import check_address
from protocol.errors import InvalidParameter


def run_http(
    daemon: DaemonOptions,
    settings: ServerSettings,
    models: Sequence[str],
    served_names: Sequence[str],
) -> int:
    """
    Args:
        models: NAME=ADDRESS each; several names of one address are names of one model.
        served_names: of the model at the daemon's address, instead of its own.

    Raises:
        UsageError: one of them is not that, or the settings contradict each other.
    """
    names: dict[str | None, list[str]] = {}
    for model in models:
        name, _, address = model.partition("=")
        if not name or not address:
            raise UsageError(f"--model is {model!r}, it must be NAME=ADDRESS")
        try:
            check_address(address)
        except InvalidParameter as error:
            raise UsageError(f"--model {name}: {error}") from None
        if any(name in others for others in names.values()):
            raise UsageError(f"--model {name} is given twice; give each engine its own name")
        names.setdefault(address, []).append(name)
    if names and served_names:
        raise UsageError("--served-model-name is for --address; --model has the name already")
    if not names:
        names[daemon.address] = list(served_names)
    return serve_models(
        settings,
        ServedModels(
            ServedModel(
                functools.partial(dataclasses.replace(daemon, address=address).client, "http"), each
            )
            for address, each in names.items()
        ),
    )


def serve_models(settings: ServerSettings, models: ServedModels) -> int:
    """Raises UsageError. Returns the exit code."""
    try:
        return serve(settings, models)
    except InvalidInput as error:
        raise UsageError(str(error)) from None
    except AddressUnavailable as error:
        print_fault(error)
        return EXIT_ADDRESS
