"""Chooses the backend of a device. Backends are imported when they are chosen."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Literal

import torch

from kernels.interface.device_steps import DeviceStepOperations
from kernels.interface.operations import Operations
from kernels.triton.device_limits import FLOAT8_CAPABILITY

_LOWEST_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 in its tensor cores and asynchronous copies to shared memory."""

FloatWeights = Literal["float32", "bfloat16", "int8", "int4"]
"""float32; bfloat16; int8 with a scale a row; 4 bits with a scale and a minimum for 32 inputs."""

Bfloat16Products = Literal["units", "widened"]
"""By the CPU's own units, or in float32, with the same results."""


class UnsupportedDevice(Exception):
    """No backend serves the device, or not in the way that was asked for."""


def select_operations(
    device: torch.device | str,
    *,
    batch_invariant: bool = False,
    float_weights: FloatWeights = "float32",
    keeps_blocks: bool = True,
    fp8_cache: bool = False,
    num_threads: int | None = None,
    by_node: bool = False,
    quantised_types: AbstractSet[str] = frozenset(),
    report: Callable[[str], None] = lambda line: None,
) -> Operations:
    """The operations for `device`: a CPU's are the native library's, or else torch's.
    Raises UnsupportedDevice: this build cannot run on the device, or not in the way asked for.

    Args:
        device: "cpu", or a CUDA device: "cuda" (the current one) or "cuda:1".
        batch_invariant: a request gets the same bits whatever else runs. The native library's
            operations on float32 are so always.
        float_weights: the format of floating dense weights; the native library only.
        keeps_blocks: quantised blocks that the backend runs stay as they are; else they are
            dequantised, and become `float_weights`.
        fp8_cache: keys and values will be float8_e4m3fn, on a GPU.
        num_threads: of the native library; None: as `kernels.cpu.threads.choose_threads` says.
        by_node: each node of memory has its own part of the native library's work.
        quantised_types: of the model, see `QuantisedTensor.type_name`. A GPU keeps those that it
            runs, if `keeps_blocks`.
        report: gets a line before native kernels are built, or if torch replaces them.
    """
    chosen = torch.device(device)
    if chosen.type == "cpu":
        threads = num_threads, by_node
        return _cpu_operations(batch_invariant, float_weights, keeps_blocks, threads, report)
    if float_weights != "float32":
        raise UnsupportedDevice(
            f"--quantization {float_weights} runs on a CPU only; leave it out, or run with "
            "--device cpu"
        )
    if chosen.type != "cuda":
        raise UnsupportedDevice(
            f'device "{device}" is not supported; supported: "cpu" and "cuda". Run with '
            "--device cpu or --device cuda"
        )
    numbered = check_cuda(chosen)
    if fp8_cache:
        check_fp8(numbered, "--kv-cache-dtype fp8", "use --kv-cache-dtype auto")
    from kernels.triton.operations import TritonOperations

    return TritonOperations(
        numbered,
        batch_invariant=batch_invariant,
        quantised_types=quantised_types if keeps_blocks else frozenset(),
    )


def native_bfloat16(
    device: torch.device,
    num_threads: int | None,
    report: Callable[[str], None],
    *,
    by_node: bool = False,
) -> Bfloat16Products | None:
    """How the native library multiplies weights of bfloat16; None: there is none, or no CPU.
    Arguments: see `select_operations`."""
    if device.type != "cpu":
        return None
    from kernels.cpu.library import NativeLibraryUnavailable, load_library

    try:
        library = load_library(num_threads, report, by_node=by_node)
    except NativeLibraryUnavailable:
        return None
    return "units" if library.has_bfloat16 else "widened"


def check_fp8(device: torch.device, what: str, cure: str) -> None:
    """Raises UnsupportedDevice: the GPU has no arithmetic on float8_e4m3fn, which `what` needs."""
    capability = torch.cuda.get_device_capability(device)
    if capability < FLOAT8_CAPABILITY:
        raise UnsupportedDevice(
            f"{what} needs compute capability {FLOAT8_CAPABILITY[0]}.{FLOAT8_CAPABILITY[1]} (Ada, "
            f'Hopper) or above, device "{device}" ({torch.cuda.get_device_name(device)}) has '
            f"{capability[0]}.{capability[1]}; {cure}"
        )


def device_step_operations(device: torch.device) -> DeviceStepOperations:
    """Step inputs and sampling on a CUDA device that `select_operations` has accepted.
    Raises UnsupportedDevice: another device."""
    if device.type != "cuda":
        raise UnsupportedDevice(
            f'device "{device}" prepares no steps and samples nothing by itself, only "cuda" does; '
            "run with --device cuda, or use CPUModelRunner"
        )
    from kernels.triton.device_steps import TritonDeviceSteps

    return TritonDeviceSteps()


def _cpu_operations(
    batch_invariant: bool,
    float_weights: FloatWeights,
    keeps_blocks: bool,
    threads: tuple[int | None, bool],
    report: Callable[[str], None],
) -> Operations:
    from kernels.cpu.library import NativeLibraryUnavailable, load_library

    try:
        library = load_library(threads[0], report, by_node=threads[1])
    except NativeLibraryUnavailable as error:
        if isinstance(error.__cause__, ValueError):  # a number of threads that is none
            raise UnsupportedDevice(str(error)) from error
        if float_weights != "float32":
            raise UnsupportedDevice(
                f"--quantization {float_weights} needs the native CPU kernels: {error}; mend that, "
                "or leave the option out"
            ) from error
        if batch_invariant:
            raise UnsupportedDevice(
                f"--batch-invariant on a CPU needs the native kernels ({error}): torch orders the "
                "sums of dense products by the number of rows, so that last bits depend on the "
                "batch; mend that, or leave the option out"
            ) from error
        report(f"torch runs the model, slower than the native CPU kernels would: {error}")
        from kernels.torch.operations import TorchOperations

        return TorchOperations()
    from kernels.cpu.operations import CpuOperations

    return CpuOperations(library, linear_weights=float_weights, keeps_blocks=keeps_blocks)


def check_cuda(device: torch.device) -> torch.device:
    """The device with its number. Raises UnsupportedDevice: it does not run Triton's kernels."""
    if not torch.cuda.is_available():
        raise UnsupportedDevice(
            f'device "{device}": torch {torch.__version__} sees no CUDA device; install a torch '
            "with CUDA and a driver, look what nvidia-smi shows, or run with --device cpu"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise UnsupportedDevice(
            f'device "{device}": there are {torch.cuda.device_count()} CUDA devices, numbered from '
            "0; choose one of them"
        )
    numbered = torch.device("cuda", index)
    capability = torch.cuda.get_device_capability(numbered)
    if capability < _LOWEST_CAPABILITY:
        raise UnsupportedDevice(
            f'device "{device}" ({torch.cuda.get_device_name(numbered)}) has compute capability '
            f"{capability[0]}.{capability[1]}, the kernels need {_LOWEST_CAPABILITY[0]}."
            f"{_LOWEST_CAPABILITY[1]} (Ampere) or above; run with --device cpu"
        )
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedDevice(
            f'device "{device}" needs triton, which is not installed; install it '
            "(pip install triton), or run with --device cpu"
        )
    if (missing := _missing_of_c_compiler()) is not None:
        raise UnsupportedDevice(
            f'device "{device}" needs a C compiler at its first start, with which triton builds '
            f"the launchers of its kernels, and {missing}; or run with --device cpu"
        )
    return numbered


def _missing_of_c_compiler() -> str | None:
    """What triton lacks to build a launcher, and how to install it. None: nothing, or an earlier
    start has left launchers in triton's cache."""
    cache = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    if next(Path(cache).glob("*/__triton_launcher*"), None) is not None:
        return None
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        names = " nor ".join(compilers)
        return f"there is no {names}; install one (apt-get install gcc) or set CC to its path"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme)["include"], "Python.h")
    if not header.is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        return f"{header} is missing; install this Python's headers (apt-get install {package})"
    return None
