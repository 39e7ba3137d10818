"""Whether this program is installed as a whole, and as its own: asked first by its two commands.
Imports nothing of ours, as that may be gone, or another's."""

import importlib
import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of builds for CPUs. On others a torch for Linux brings gigabytes of CUDA."""
ENGINE_PACKAGES = ("numpy", "torch", "safetensors", "gguf", "transformers", "llguidance", "pip")
"""Names of packages that the extra `cpu` brings, and that the client does without."""
_NAME = "engine-core"
_OURS = ("engine_core", "protocol", "kernels", "frontend")
_ROOT = Path(__file__).resolve().parents[1]
_START_FAILED = 3  # `ExitCode`


def engine_core() -> None:
    """Entry point of the console script `engine-core`."""
    _run("engine-core", "engine_core.cli")


def engine_client() -> None:
    """Entry point of the console script `engine-client`."""
    _run("engine-client", "frontend.cli")


def _run(program: str, module: str) -> None:
    wrong = wrong_package()
    if wrong is None:
        try:
            importlib.import_module(module).main()
        except ImportError as error:
            # the library of command lines has its own error around Python's
            gone = error.__cause__ if isinstance(error.__cause__, ImportError) else error
            if str(gone.name).partition(".")[0] not in _OURS:
                raise
            wrong = files_are_gone(str(gone.name))
        except KeyboardInterrupt:  # while modules are imported
            sys.exit(130)
    if wrong is not None:
        print(f"{program}: {wrong}", file=sys.stderr)  # noqa: T201
        sys.exit(_START_FAILED)


def wrong_package() -> str | None:
    """What to do where a package of ours is gone, or hidden by one of the same name; None: nothing.
    Four names in one folder are shared with whatever else is installed there."""
    for name in _OURS:
        if not (ours := _ROOT / name / "__init__.py").is_file():
            return files_are_gone(str(ours))
        spec = find_spec(name)
        found = "" if spec is None or spec.origin is None else spec.origin
        if found and Path(found).resolve() != ours:
            others = {*packages_distributions().get(name, ())} - {_NAME}
            owner = f" of the distribution {', '.join(sorted(others))}" if others else ""
            return (
                f"the package `{name}`{owner} at {Path(found).parent} hides that of {_NAME}; use a "
                "virtual environment of its own, or take that folder off PYTHONPATH"
            )
    return None


def files_are_gone(what: str) -> str:
    """The line for a part of this program that cannot be found, with what to do."""
    return (
        f"{what} of {_NAME} is gone, as after `pip uninstall kernels`, which takes files of the "
        f"same names; install {_NAME} again: "
        f"{_command(_source(''), '--force-reinstall', '--no-deps')}"
    )


def missing_engine(*, has_gpu: bool) -> str | None:
    """What to type where the client is installed alone; None: the engine's packages are there."""
    missing = [name for name in ENGINE_PACKAGES if find_spec(name) is None]
    if not missing:
        return None
    from_index = ["--torch-backend=cpu"] if _is_by_uv() else ["--extra-index-url", CPU_INDEX]
    typed = _command(_source("[gpu]")) if has_gpu else _command(_source("[cpu]"), *from_index)
    return (
        f"the client is installed, the engine is not: there is no {', '.join(missing)}. To run "
        f"models on this machine, type: {typed}"
    )


def missing_numpy(error: ImportError) -> str | None:
    """What to type where the simulator's commands have no NumPy; None: another package is gone."""
    if not isinstance(error.__cause__, ImportError) or error.__cause__.name != "numpy":
        return None
    return f"plan and simulate need NumPy; to get it, type: {_command(_source('[bench]'))}"


def _command(*arguments: str) -> str:
    python = sys.executable
    by = ["uv", "pip", "install", "--python", python]
    return shlex.join([*(by if _is_by_uv() else [python, "-m", "pip", "install"]), *arguments])


def _is_by_uv() -> bool:
    return (_metadata("INSTALLER") or "").strip() == "uv"


def _source(extra: str) -> str:
    """The requirement that installs the same source again, with an extra."""
    text = _metadata("direct_url.json")
    if text is None:
        return f"{_NAME}{extra}"
    found = json.loads(text)
    vcs = found.get("vcs_info", {})
    before, after = (f"{vcs['vcs']}+", f"@{vcs['commit_id']}") if vcs else ("", "")
    return f"{_NAME}{extra} @ {before}{found['url']}{after}"


def _metadata(file: str) -> str | None:
    try:
        return distribution(_NAME).read_text(file)
    except PackageNotFoundError:
        return None
