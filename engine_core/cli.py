"""The console script `engine-core`: reads options, then hands over to the daemon. Quick to import:
torch and the rest load only once the options are known to be good."""

import contextlib
import logging
import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cyclopts
from cyclopts import App, Parameter

from engine_core.errors import ConfigurationError, ExitCode, StartupError
from engine_core.front_door import CLIENT_COMMANDS, as_typed
from engine_core.installation import missing_numpy
from engine_core.model_commands import check_engine_installed, list_models, pull, rm, stop
from engine_core.options.engine import EngineOptions
from engine_core.preset_commands import cp, create, show
from engine_core.process.logs import flush_standard_streams, open_standard_streams
from protocol.logs import log_to_stderr

if TYPE_CHECKING:
    from engine_core.process.owner import Owner
    from engine_core.process.service_manager import ServiceManager
    from engine_core.process.suspects import Suspects

logger = logging.getLogger(__name__)


def _print_panel(console: Any, options: Any, panel: Any) -> None:
    """Help texts are docstrings: their lines are joined."""
    from cyclopts.help import DefaultFormatter

    for entry in panel.entries:
        text = entry.description.primary_renderable
        text.plain = " ".join(text.plain.split())
    DefaultFormatter()(console, options, panel)


app = App(
    name="engine-core",
    help="Serve a language model to any number of clients on this machine.",
    usage="Usage: engine-core [COMMAND | MODEL] [OPTIONS]",
    help_format="plaintext",  # a renderer of Markdown takes a fifth of the time of --help
    help_formatter=_print_panel,
    version_flags=["--version"],
    version=lambda: _version(),
    default_parameter=Parameter(show=False),  # but for the common ones, which say so themselves
    result_action="return_value",
)


_DEFAULTS = EngineOptions()


@app.default
def serve(options: EngineOptions = _DEFAULTS) -> int:
    log_to_stderr(options.log_level, options.log_format)
    check_engine_installed()
    from engine_core.process.owner import Owner
    from engine_core.process.service_manager import ServiceManager

    service_manager = ServiceManager()
    try:
        owner = Owner(watches_stdin=options.exit_on_stdin_eof, pid=options.parent_pid)
        if not options.supervise:
            return _serve(options, owner, service_manager)
        from engine_core.process.supervisor import DEFAULT_MAX_RESTARTS, supervise

        return supervise(
            lambda suspects: _serve(options, owner, service_manager, suspects),
            max_restarts=options.max_restarts or DEFAULT_MAX_RESTARTS,
            drain_timeout_s=options.drain_timeout,
            owner=owner,
            service_manager=service_manager,
        )
    except ConfigurationError as error:
        return _end_with(error, ExitCode.WRONG_OPTIONS, options)


@app.command(show=False)
def check(*, models: list[str] | None = None, options: EngineOptions = _DEFAULTS) -> int:
    """Whether these options are accepted, and each of `models` is a path or has a name that may be
    fetched. --model is not looked for. Nothing is fetched or started."""
    from engine_core.model_files.errors import ModelFilesError
    from engine_core.model_files.names import find_model
    from engine_core.options.checks import check_options

    check_options(options)
    options.scheduling.check()
    try:
        for model in models or ():
            find_model(model, "--model")
    except ModelFilesError as error:
        raise ConfigurationError(str(error)) from None
    return 0


def _serve(
    options: EngineOptions,
    owner: "Owner",
    service_manager: "ServiceManager",
    suspects: "Suspects | None" = None,
) -> int:
    from engine_core.daemon import run_daemon

    try:
        if options.parallel.join is not None:
            from engine_core.startup.worker import join

            return join(options, owner)
        return run_daemon(options, owner, service_manager, suspects)
    except ConfigurationError as error:
        return _end_with(error, ExitCode.WRONG_OPTIONS, options)
    except StartupError as error:
        return _end_with(error, ExitCode.START_FAILED, options)


def _end_with(error: StartupError, code: ExitCode, options: EngineOptions) -> int:
    if options.log_format == "text":
        return _print_error(str(error), code)
    logger.error("%s", error)
    return code


keys = App(
    name="keys",
    help="Make the engine's key, and a first admin's; `keys add NAME` makes one for a client.",
    default_parameter=Parameter(show=True),
)
app.command(keys)

_KeyFolder = Annotated[
    Path | None, Parameter(help="Where the keys are. [default: in the user's configuration]")
]


@keys.default
def _make_keys(*, folder: _KeyFolder = None) -> int:
    return _with_keys(folder, "admin", is_admin=True, is_new=True)


@keys.command(name="add")
def _add_key(
    name: Annotated[str, Parameter(help="Of the client; its requests count for this tenant.")],
    /,
    *,
    admin: Annotated[
        bool, Parameter(help="May also drain, reset and read about all requests.", negative="")
    ] = False,
    folder: _KeyFolder = None,
) -> int:
    """Make a client's key. A running engine takes it at once; it stops taking it for new
    connections when authorized/NAME.key is removed."""
    return _with_keys(folder, name, is_admin=admin, is_new=False)


def _with_keys(folder: Path | None, name: str, *, is_admin: bool, is_new: bool) -> int:
    from platformdirs import user_config_path

    from engine_core.server.keys import KeyFolder

    key_folder = KeyFolder((folder or user_config_path("engine-core") / "keys").absolute())
    try:
        if is_new:
            key_folder.make()
        file = key_folder.add(name, is_admin=is_admin)
    except ConfigurationError as error:
        return _print_error(str(error), ExitCode.WRONG_OPTIONS)
    lines = [f"key {name!r}{' (admin)' if is_admin else ''} for clients: {file}"]
    lines += ["move that file to the client, and use it there: engine-client --keys FILE ..."]
    if is_new:
        lines += [f"serve with: engine-core --bind tcp://HOST:PORT --keys {key_folder.folder} ..."]
    print("\n".join(lines))  # noqa: T201 - no secret among them
    return 0


app.command(
    "frontend.cluster.command:on_ray",
    name="on-ray",
    help="Serve models over HTTP on a Ray cluster, as a deployment file says.",
)
app.command(pull)
app.command(list_models, name="list")
app.command(rm)
app.command(create)
app.command(show)
app.command(cp)
app.command(stop)
app.command(
    "engine_core.doctor:doctor",
    name="doctor",
    help="Say what this machine has, what the engine will use of it, and what would help.",
)
for _name, _text in CLIENT_COMMANDS.items():  # for --help: `as_typed` hands them over
    app.command(App(name=_name, help=_text, show=bool(_text)))
app.command("frontend.simulator.command:plan", name="plan", help="Say how many engines a load "
            "needs within SLOs.", default_parameter=Parameter(show=None))  # fmt: skip
app.command("frontend.simulator.command:app", name="simulate", help="Run the scheduler and cache "
            "that serve in virtual time; replay, fit and validate step traces.")  # fmt: skip
app.command("frontend.cluster.batch_command:batch", name="batch", help="Answer a JSONL file of "
            "requests; run again after an interruption, it goes on.")  # fmt: skip


@app.command(name="--help-all")
def _help_all() -> None:
    """Display every option and exit."""
    app.default_parameter = None
    app.meta(["--help"])


@app.meta.default
def _with_config(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[
        Path | None,
        Parameter(
            help="A TOML file with the same options, dashes or underscores; the command "
            "line overrides it.",
            show=True,
        ),
    ] = None,
) -> int:
    if config is not None:
        if not config.is_file():
            return _print_error(
                f"--config: there is no file {config}; check the path", ExitCode.WRONG_OPTIONS
            )
        try:
            tomllib.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return _print_error(
                f"--config: {config} cannot be read: {error}; it is to be TOML, `option = value` "
                "a line",
                ExitCode.WRONG_OPTIONS,
            )
        app.config = [cyclopts.config.Toml(config, must_exist=True)]
    result = app(tokens)
    return int(result or 0)


def _print_error(text: str, code: ExitCode) -> int:
    with contextlib.suppress(OSError):  # a full disk, or nobody reads it
        print(f"engine-core: {text}", file=sys.stderr)  # noqa: T201
    return code


def _version() -> str:
    from protocol.release import release_line

    return release_line()


def main() -> None:
    """Entry point. Exit codes: `ExitCode`."""
    open_standard_streams()
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir("/")  # it was removed; torch's libraries would end the process
    try:
        is_terminal = sys.stderr.isatty()
        own = {*app} - CLIENT_COMMANDS.keys()
        code = app.meta(
            as_typed(sys.argv[1:], own),
            exit_on_error=False,
            print_error=is_terminal,
            result_action="return_value",
        )
    except cyclopts.CycloptsError as error:
        code = ExitCode.WRONG_OPTIONS
        if not is_terminal:  # a line for a log, not a box
            _print_error(" ".join(str(error).split()), code)
    except ConfigurationError as error:
        code = _print_error(str(error), ExitCode.WRONG_OPTIONS)
    except StartupError as error:
        code = _print_error(str(error), ExitCode.START_FAILED)
    except ImportError as error:
        if (needed := missing_numpy(error)) is None:
            raise
        code = _print_error(needed, ExitCode.START_FAILED)
    flush_standard_streams()
    sys.exit(int(code or 0))


if __name__ == "__main__":
    main()
