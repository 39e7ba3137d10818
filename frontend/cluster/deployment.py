"""The deployment file of `engine-core on-ray`: which models, how many replicas, on what. Knows
nothing of Ray's code."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine_core.errors import ConfigurationError
from frontend.engine.engine_options import daemon_arguments
from frontend.errors import InvalidInput
from frontend.fleet.router import RoutingPolicy
from frontend.http.settings import ServerSettings

NAME = "engine-core"
"""The name of Serve's application: a cluster has one."""

_Count = Annotated[int, Meta(ge=1)]
_OrNone = Annotated[int, Meta(ge=0)]
_Seconds = Annotated[float, Meta(ge=0)]
_Positive = Annotated[float, Meta(gt=0)]
_Share = Annotated[float, Meta(gt=0, le=1)]

_NAME = re.compile(r"[A-Za-z0-9._:@/-]{1,128}")
_OWN_OPTIONS = {
    "model": "give it as `model` beside `options`",
    "model_name": "give it as `name` beside `options`",
    "bind": "each replica listens on a port of its node",
    "keys": "replicas and HTTP replicas get keys of the deployment's own",
    "insecure": "replicas and HTTP replicas get keys of the deployment's own",
    "supervise": "Ray starts a replica again",
    "max_restarts": "Ray starts a replica again",
    "tensor_parallel_size": "give it beside `options`",
    "pipeline_parallel_size": "give it beside `options`",
    "workers_bind": "the workers of a replica join at a port of its node",
    "num_joining": "the workers of a replica join at a port of its node",
    "join": "the workers of a replica join at a port of its node",
    "disaggregation_mode": "a deployment's replicas are alike; start such engines by address",
    "data_parallel_size": "say how many replicas by `min_replicas` and `max_replicas`",
}
"""Options of the daemon that a deployment decides itself."""
_OF_WORKERS = ("tokenizer", "num_threads", "log_level", "log_format")
_NOT_BEHIND_RAY = {
    "uds": "Ray Serve's proxies listen on `host` and `port`",
    "log_format": "Ray Serve's replicas have logs of their own",
    "request_timeout": "Ray Serve's proxies read the requests, without that limit",
}
"""Options of the HTTP server that do nothing behind Ray."""


def _one_cpu() -> dict[str, float]:
    return {"CPU": 1.0}


class Autoscaling(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Where `max_replicas` is above `min_replicas`. Names are Ray Serve's, but for
    `target_slo_attainment`."""

    target_ongoing_requests: _Positive = 32.0
    """Requests of a replica, running and waiting, that the number of replicas follows."""
    target_slo_attainment: _Share = 0.95
    """Share of requests that must meet the SLOs of `options`; below it a replica gets fewer."""
    upscale_delay_s: _Seconds = 10.0
    downscale_delay_s: _Seconds = 120.0
    downscale_to_zero_delay_s: _Seconds = 300.0
    look_back_period_s: _Positive = 30.0


class ModelDeployment(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The replicas of one model."""

    model: Annotated[str, Meta(min_length=1)]
    """A path that every node has, a known name, or a hub id, as for `engine-core --model`."""
    name: str = ""
    """What requests call it; default: as `model`, of a path its last part."""
    min_replicas: _OrNone = 1
    max_replicas: _Count | None = None
    """Default: `min_replicas`, at least 1."""
    tensor_parallel_size: _Count = 1
    pipeline_parallel_size: _Count = 1
    resources: dict[str, _Positive] = msgspec.field(default_factory=_one_cpu)
    """Resources of each rank, by Ray's names."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How a replica's ranks are placed."""
    options: dict[str, Any] = {}
    """The daemon's, as in its own TOML file."""
    env: dict[str, str] = {}
    """Variables of the replicas' environment."""
    autoscaling: Autoscaling = Autoscaling()
    health_timeout_s: _Positive = 30.0
    """An engine that ends no step for so long, and is not idle, is started again."""
    startup_timeout_s: _Positive = 3600.0
    """Seconds for a replica to get ready, downloads included."""

    @property
    def most_replicas(self) -> int:
        return max(1, self.min_replicas) if self.max_replicas is None else self.max_replicas

    @property
    def served_name(self) -> str:
        is_path = self.model.startswith((".", "/", "~"))
        last = Path(self.model).name.removesuffix(".gguf")
        return self.name or (last if is_path else self.model)

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def drain_timeout_s(self) -> float:
        return float(self.options.get("drain_timeout", 30.0))

    def daemon_arguments(self) -> list[str]:
        """Of the command line, without addresses.
        Raises InvalidInput: an option that is not one."""
        sizes = [
            f"--tensor-parallel-size={self.tensor_parallel_size}",
            f"--pipeline-parallel-size={self.pipeline_parallel_size}",
        ]
        options = {"model_name": self.served_name, **self.options}
        arguments = [*daemon_arguments(self.model, options), *self._num_threads()]
        return arguments + sizes * (self.num_ranks > 1)

    def worker_arguments(self) -> list[str]:
        """What a worker that joins is told beside the model; it hears the rest from its engine."""
        given = {name: self.options[name] for name in _OF_WORKERS if name in self.options}
        return [*daemon_arguments(self.model, given)[2:], *self._num_threads()]

    def _num_threads(self) -> list[str]:
        num_cpus = int(self.resources.get("CPU", 0))
        if not num_cpus or "num_threads" in self.options or "GPU" in self.resources:
            return []
        return [f"--num-threads={num_cpus}"]


class HttpDeployment(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The HTTP replicas: [http] without the server's own settings."""

    replicas: _Count = 1
    resources: dict[str, _Positive] = msgspec.field(default_factory=_one_cpu)
    """Resources of each replica of the server."""
    routing_policy: RoutingPolicy = "cache-aware"
    """The rule by which an engine is chosen for a request; docs/guides/router.md."""
    reconnect_timeout_s: _Positive = 600.0
    """For a stream whose engine is lost: until another one has its place."""


@dataclasses.dataclass(frozen=True)
class Deployment:
    models: tuple[ModelDeployment, ...]
    http: HttpDeployment
    server: ServerSettings


class _File(msgspec.Struct, forbid_unknown_fields=True):
    models: Annotated[list[ModelDeployment], Meta(min_length=1)]
    http: dict[str, Any] = {}


def read_deployment(path: Path) -> Deployment:
    """A TOML file; names have dashes or underscores. The daemon's options are checked by the
    daemon. Raises ConfigurationError: there is no such file, or it cannot be deployed."""
    try:
        return deployment_of(msgspec.toml.decode(path.read_bytes()))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}; check the path") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def deployment_of(tables: dict[str, Any]) -> Deployment:
    """What a file has. Raises ConfigurationError: it cannot be deployed."""
    try:
        models = [_underscored(each) for each in tables.get("models", ())]
        for table in models:
            for name in ("options", "autoscaling"):
                if name in table:
                    table[name] = _underscored(table[name])
        file = msgspec.convert({**tables, "models": models}, _File)
        http, server = _http(_underscored(file.http))
        _check_models(file.models)
    except (msgspec.ValidationError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"{error}; see docs/guides/cluster.md") from None
    except InvalidInput as error:
        raise ConfigurationError(str(error)) from None
    return Deployment(tuple(file.models), http, server)


def _underscored(table: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in table.items()}


def _http(table: dict[str, Any]) -> tuple[HttpDeployment, ServerSettings]:
    own = {field.name for field in msgspec.structs.fields(HttpDeployment)}
    settings = {field.name for field in dataclasses.fields(ServerSettings)}
    for name in table:
        if name in _NOT_BEHIND_RAY:
            raise ConfigurationError(f"[http] has no {name}: {_NOT_BEHIND_RAY[name]}; omit it")
        if name not in own | settings:
            raise ConfigurationError(
                f"[http] has no {name!r}; it takes {', '.join(sorted(own))} and the options of "
                "`engine-client http`"
            )
    http = msgspec.convert({n: v for n, v in table.items() if n in own}, HttpDeployment)
    given = {n: v for n, v in table.items() if n not in own}
    server = msgspec.convert(given, ServerSettings)
    if not server.port:
        raise ConfigurationError("[http] has port 0; every node's proxy has the same one, give it")
    return http, server


def _check_models(models: list[ModelDeployment]) -> None:
    names = [each.served_name for each in models]
    for each in models:
        name = each.served_name
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"model {name!r} needs a `name` of up to 128 letters, digits and ._:@/-"
            )
        if names.count(name) > 1:
            raise ConfigurationError(f"two models have the name {name!r}; give each its own")
        if each.most_replicas < each.min_replicas:
            raise ConfigurationError(
                f"model {name!r}: max_replicas is {each.max_replicas}, it must be at least "
                f"min_replicas, {each.min_replicas}"
            )
        for option in each.options:
            if option in _OWN_OPTIONS:
                raise ConfigurationError(
                    f"model {name!r}: options has {option!r}: {_OWN_OPTIONS[option]}"
                )
        _check_options(each)


def _check_options(model: ModelDeployment) -> None:
    command = [sys.executable, "-m", "engine_core.cli", "check", *model.daemon_arguments()]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    if checked.returncode:
        said = checked.stderr.strip().removeprefix("engine-core: ")
        raise ConfigurationError(f"model {model.served_name!r}: {said}")
