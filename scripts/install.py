"""Two steps of `make install` and of the container: torch without what this machine cannot use, and
the native CPU kernels. Needs nothing that is installed, and installs for the Python that runs it.

    python scripts/install.py torch [PIP_OPTION ...]
    python scripts/install.py kernels
"""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_CPU_TORCH = "torch==2.13.0"
"""As tested. Without `+cpu`: mirrors need not keep that part of the version."""
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def torch_arguments(*, has_gpu: bool, index_answers: bool) -> list[str]:
    """Of `pip install`. On Linux a plain `torch` brings gigabytes of CUDA; where pip sees the index
    of CPU builds too, it takes theirs, as 2.13.0+cpu is higher than 2.13.0."""
    if has_gpu:
        return ["torch>=2.11"]
    return [_CPU_TORCH, *(("--extra-index-url", CPU_INDEX) if index_answers else ())]


def complaint(*, has_gpu: bool, cuda: str) -> str | None:
    """What is wrong with the torch that is there, and what to do; None: nothing.
    `cuda`: what it was built for; empty: for a CPU."""
    if has_gpu or not cuda:
        return None
    return (
        f"== this machine has no NVIDIA GPU, and its torch is a build for CUDA {cuda}: it works, "
        "and takes gigabytes more than it needs. To replace it:\n"
        f"   {sys.executable} -m pip uninstall -y torch\n"
        f"   {sys.executable} -m pip install {_CPU_TORCH} --index-url {CPU_INDEX}   # or a mirror"
    )


def has_cpu_builds(index: str) -> bool:
    """Whether pip, with its proxy and certificates, reaches that index and finds a torch for this
    Python there. Its other sources are put aside."""
    found = subprocess.run(
        [*_PIP, "index", "versions", "torch", "--index-url", index, "--timeout", "5",
         "--retries", "0"],
        env={**os.environ, "PIP_EXTRA_INDEX_URL": index, "PIP_FIND_LINKS": "/nonexistent"},
        capture_output=True, check=False,
    )  # fmt: skip
    return found.returncode == 0


def has_nvidia_gpu() -> bool:
    """One that works: `nvidia-smi` is also where there is none."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return listed.returncode == 0 and "GPU " in listed.stdout


def install_torch(pip_options: Sequence[str]) -> int:
    has_gpu = has_nvidia_gpu()
    needs_index = not has_gpu and platform.system() == "Linux"  # others have no CUDA
    index_answers = needs_index and has_cpu_builds(CPU_INDEX)
    if needs_index and not index_answers:
        print(f"== {CPU_INDEX} does not answer: taking the torch that pip finds", flush=True)
    arguments = torch_arguments(has_gpu=has_gpu, index_answers=index_answers)
    code = subprocess.run([*_PIP, "install", *pip_options, *arguments], check=False).returncode
    if code:
        return code
    asked = [sys.executable, "-c", "import torch; print(torch.version.cuda or '')"]
    cuda = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if wrong := complaint(has_gpu=has_gpu, cuda=cuda):
        print(wrong, file=sys.stderr, flush=True)
    return 0


def build_kernels() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from kernels.cpu.library import NativeLibraryUnavailable, load_library

    try:
        load_library(report=lambda line: print(line, flush=True))
    except NativeLibraryUnavailable as error:
        print(f"torch will run models, slower than these kernels would: {error}", flush=True)
    return 0


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["torch", *pip_options]:
            return install_torch(pip_options)
        case ["kernels"]:
            return build_kernels()
        case ["--help" | "-h"]:
            print(__doc__)
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
