"""Compiles kernel variants for GPUs on a machine without one, with one version of triton.

Worker processes compile: only they import that triton, and a compiler that aborts ends one of them.
"""

import contextlib
import dataclasses
import fcntl
import functools
import importlib
import io
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from tests.kernels.compiled.cases import SHARED_BYTES, KernelVariant
from tests.kernels.compiled.table import Figures, Outcome, read_figures

VERSION = "3.6.0"
"""Of triton: another one allots registers differently."""
FOLDER = Path(__file__).resolve().parents[3] / ".cache" / f"triton-{VERSION}"
NUM_PROCESSES = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
"""Each imports torch and triton for itself: beside other test processes one is enough."""
CAPABILITY = 90
"""The table's: an H100's or H200's."""
_FIGURES_FILE = "figures.6.json"
Item = TypeVar("Item")
Result = TypeVar("Result")


class CompilerNotFetched(Exception):
    """Says why, and what to do."""


def fetch_compiler(folder: Path = FOLDER) -> Path:
    """The folder that goes on the path; fetched with this Python's pip if it is not there.

    Raises:
        CompilerNotFetched: no pip, no network, or no wheel for this machine.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder.parent, os.O_RDONLY)
    try:
        # a second fetch would replace what the first one's tests use
        fcntl.flock(lock, fcntl.LOCK_EX)
        return folder if _is_complete(folder) else _fetch(folder)
    finally:
        os.close(lock)


def _fetch(folder: Path) -> Path:
    # beside its place, so that a fetch that is broken off leaves nothing half done
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetching-") as temporary:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
        command += ["--quiet", "--no-deps", "--target", f"{temporary}/new", f"triton=={VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not _is_complete(Path(temporary, "new")):
            reason = (done.stderr.strip().splitlines() or ["pip left no compiler"])[-1]
            raise CompilerNotFetched(
                f"triton {VERSION} cannot be fetched: {reason}; with a network run "
                f"{' '.join(command[:3])} install --no-deps --target {folder} triton=={VERSION}"
            )
        shutil.rmtree(folder, ignore_errors=True)
        Path(temporary, "new").rename(folder)
    return folder


def _is_complete(folder: Path) -> bool:
    tools = folder / "triton" / "backends" / "nvidia" / "bin"
    metadata = folder / f"triton-{VERSION}.dist-info" / "METADATA"
    return metadata.is_file() and all((tools / name).is_file() for name in ("ptxas", "cuobjdump"))


def compile_all(
    module: str, variants: Iterable[KernelVariant], capability: int = CAPABILITY
) -> list[Outcome]:
    """Figures of each variant on GPUs of a compute capability (times 10), or what went wrong; for
    this capability the module lists the same ones."""
    variants = list(variants)
    items = [(module, capability, f"{each.module} {each.name}") for each in variants]
    with _compiling():
        results = run_in_workers(compile_variant, items, lambda _: "it ends the compiler's process")
    return [
        Outcome(variant, error=result)
        if isinstance(result, str)
        else Outcome(variant, figures=result)
        for variant, result in zip(variants, results, strict=True)
    ]


def ptxas_version() -> str:
    """Of the compiler that `compile_all` uses."""
    tool = FOLDER / "triton" / "backends" / "nvidia" / "bin" / "ptxas"
    return _run(tool, "--version").split()[-1]


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Processes that start inside import the fetched triton, and do not interpret."""
    folder, interprets = str(fetch_compiler()), os.environ.pop("TRITON_INTERPRET", None)
    sys.path.insert(0, folder)  # which multiprocessing hands on
    try:
        yield
    finally:
        sys.path.remove(folder)
        if interprets is not None:
            os.environ["TRITON_INTERPRET"] = interprets


def run_in_workers(
    work: Callable[[Item], Result], items: list[Item], died: Callable[[Item], Result]
) -> list[Result]:
    """`work` on every item, in their order; `died` is the result of one that ends its process."""
    results: dict[int, Result] = {}
    with _start(NUM_PROCESSES) as pool:
        for index, future in enumerate([pool.submit(work, item) for item in items]):
            with contextlib.suppress(BrokenProcessPool):
                results[index] = future.result()
    for index, item in enumerate(items):
        # one that dies takes the others along: each of them runs alone, so that it is known
        if index not in results:
            with _start(1) as pool:
                try:
                    results[index] = pool.submit(work, item).result()
                except BrokenProcessPool:
                    results[index] = died(item)
    return [results[index] for index in range(len(items))]


def _start(num_processes: int) -> ProcessPoolExecutor:
    # spawn: neither torch nor LLVM is safe to fork
    return ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn"))


def compile_variant(item: tuple[str, int, str]) -> Figures | str:
    """In a worker: the variant of a module, by its file and name."""
    module, capability, name = item
    # triton prints the whole source when ptxas fails
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            return _compile(_variants(module, capability)[name], capability)
        except Exception as error:
            return _first_lines(error)


@functools.cache
def _variants(module: str, capability: int) -> dict[str, KernelVariant]:
    listed = importlib.import_module(module).variants(SHARED_BYTES[capability])
    return {f"{each.module} {each.name}": each for each in listed}


class _NoDevice:
    """Stands in for the driver of GPUs that are not there; a device's number is its capability."""

    capability = CAPABILITY

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@functools.cache
def _tools() -> Path:
    """Once a process: no device. Returns the folder of the tools that came with triton."""
    import triton

    assert triton.__version__ == VERSION
    triton.runtime.driver.set_active(_NoDevice())
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _compile(variant: KernelVariant, capability: int) -> Figures:
    import torch
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
    from triton.runtime.cache import get_cache_manager

    tools = _tools()
    _NoDevice.capability = capability
    start_s = time.perf_counter()
    has_no_pdl = capability < 90 and "PDL" in variant.constants
    compiled = variant.kernel.warmup(
        **{
            name: torch.empty(1, dtype=value, device="meta")
            if isinstance(value, torch.dtype)
            else value
            for name, value in variant.arguments.items()
        },
        **variant.constants | ({"PDL": False} if has_no_pdl else {}),
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
        grid=(1,),
    )
    # beside triton's own files: the hash covers the source, the options and the compiler
    cache = get_cache_manager(compiled.hash)
    known = cache.get_file(_FIGURES_FILE)
    if known is not None:
        return Figures.from_json(json.loads(Path(known).read_text()))
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        cubin, source = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(compiled.asm["cubin"])
        source.write_text(ptx)
        report = _run(
            get_ptxas(capability).path,
            *("-v", f"--gpu-name={sm_arch_from_capability(capability)}"),
            *(source, "-o", Path(folder, "again")),
        )
        usage = _run(tools / "cuobjdump", "-res-usage", cubin)
    figures = read_figures(
        ptx=ptx,
        ptxas_report=report,
        resource_usage=usage,
        shared_bytes=compiled.metadata.shared,
        compile_s=time.perf_counter() - start_s,
    )
    cache.put(json.dumps(dataclasses.asdict(figures)), _FIGURES_FILE, binary=False)
    return figures


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr.strip()[:500]}")
    return done.stdout + done.stderr


def _first_lines(error: BaseException) -> str:
    """The error without triton's picture of the source, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(line for line in lines if set(line) != {"^"})
    return f"{type(error).__name__}: {text[:400]}"
