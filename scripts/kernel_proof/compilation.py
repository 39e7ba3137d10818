"""Compiles kernel variants for sm_90 on a machine without a GPU: what a worker process runs.

Owns all that touches triton. Must not know limits, tables or options. triton and the kernels are
imported inside the functions, because only the workers need them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import io
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.kernel_proof.figures import Figures, read_figures

CAPABILITY = 90
ARCHITECTURE = "sm_90a"
"""How triton calls ptxas for that capability; without the "a" there is no wgmma."""
_FIGURES_FILE = "figures.2.json"


@dataclasses.dataclass(frozen=True, slots=True)
class VariantId:
    """A variant of a module, and what its author asks of it."""

    module: str
    name: str
    index: int
    needs_wgmma: bool = False
    max_registers: int = 255
    max_spill_bytes: int = 0
    spill_reason: str = ""

    def __str__(self) -> str:
        return f'{self.module.removeprefix("kernels.triton.")} "{self.name}"'


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """What a module offers to compile. `error` says why that is not known."""

    module: str
    variants: tuple[VariantId, ...] = ()
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Of compiling a variant: figures, or what went wrong."""

    variant: VariantId
    figures: Figures | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Compiler:
    """What compiles here."""

    triton: str
    ptxas: str
    cache_folder: str


class _NoDevice:
    """Stands in for the driver of a GPU that is not there."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@functools.cache
def _prepare() -> Path:
    """Once a process. Returns the folder of the tools that came with triton."""
    import triton

    triton.runtime.driver.set_active(_NoDevice())
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def describe_compiler() -> Compiler:
    """
    Raises:
        OSError: triton has no ptxas.
    """
    import triton
    from triton import knobs

    tools = _prepare()
    text = _run(tools / "ptxas", "--version")
    return Compiler(triton.__version__, text.split()[-1], str(knobs.cache.dir))


def list_variants(module: str) -> Listing:
    """Import the module and ask it. One without `variants` has none."""
    try:
        variants = _variants(module)
    except Exception as error:
        return Listing(module, error=_first_lines(error))
    names = [variant.name for variant in variants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        return Listing(module, error=f"has two variants named {twice[0]!r}; rename one")
    return Listing(
        module,
        tuple(
            VariantId(
                module,
                v.name,
                index,
                v.needs_wgmma,
                v.max_registers,
                v.max_spill_bytes,
                v.spill_reason,
            )
            for index, v in enumerate(variants)
        ),
    )


def compile_variant(variant_id: VariantId) -> Outcome:
    """Never raises for what is wrong with the kernel."""
    # triton prints the whole source when ptxas fails
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            return Outcome(variant_id, _compile(_variants(variant_id.module)[variant_id.index]))
        except Exception as error:
            return Outcome(variant_id, error=_first_lines(error))


@functools.cache
def _variants(module: str) -> list[Any]:
    listed = getattr(importlib.import_module(module), "variants", None)
    return [] if listed is None else list(listed())


def _compile(variant: Any) -> Figures:
    from triton.runtime.cache import get_cache_manager

    tools = _prepare()
    start_s = time.perf_counter()
    compiled = variant.kernel.warmup(
        **variant.arguments,
        **variant.constants,
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
            tools / "ptxas", "-v", f"--gpu-name={ARCHITECTURE}", source, "-o", Path(folder, "again")
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


def interpreting() -> bool:
    """Triton was told to interpret kernels, so that nothing can be compiled."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
