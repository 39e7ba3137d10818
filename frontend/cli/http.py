"""`engine-client http`."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.cli.options import DaemonOptions, UsageError
from frontend.http.metrics.exposition import MetricsNames
from frontend.http.server import ServerSettings, serve
from protocol.addresses import check_address
from protocol.errors import InvalidParameter


def run_http(
    daemon: DaemonOptions,
    host: str,
    port: int,
    models: Sequence[str],
    metrics_names: MetricsNames,
) -> int:
    """
    Args:
        models: NAME=ADDRESS each; several names of one address are names of one model.

    Raises:
        UsageError: one of them is not that.
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
        names.setdefault(address, []).append(name)
    if not names:
        names[daemon.address] = []
    addresses = tuple((address, tuple(each)) for address, each in names.items())
    settings = ServerSettings(
        host=host,
        port=port,
        addresses=addresses,
        connect_timeout_s=daemon.connect_timeout,
        metrics_names=metrics_names,
    )
    return serve(settings)
