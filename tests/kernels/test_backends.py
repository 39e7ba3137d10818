"""Which backend serves a device, and what is said where none does. No device is touched."""

import importlib.util
import shutil
import sysconfig

import pytest
import torch

from kernels.backends import UnsupportedDevice, device_step_operations, select_operations
from kernels.cpu.library import load_library
from kernels.cpu.threads import choose_threads
from tests.native_kernels import native_library_or_skip


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    """(count, capability) -> a machine that says it has such devices, and can compile C."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    (tmp_path / "Python.h").touch()

    def pretend(count=1, capability=(9, 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: count - 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")

    pretend.monkeypatch = monkeypatch
    return pretend


def selected_device(asked):
    """The device that was chosen; the backend's memory cannot be made without one."""
    try:
        return select_operations(asked).device
    except (AssertionError, RuntimeError) as error:
        pytest.fail(f"the backend touched the device: {error}")


@pytest.fixture
def no_native_kernels(monkeypatch):
    monkeypatch.setenv("ENGINE_CORE_NATIVE", "0")
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@pytest.fixture
def native_kernels():
    native_library_or_skip()


def test_a_cpu_has_the_native_kernels(native_kernels):
    lines = []
    operations = select_operations("cpu", report=lines.append)
    assert operations.name.startswith("native-cpu-")
    assert select_operations(torch.device("cpu")).device == torch.device("cpu")
    assert lines == []


def test_native_threads_are_as_many_as_asked_for_and_no_more_than_there_are(native_kernels):
    # the pool of this process never shrinks, so what a call gets is at least what another asked for
    most = choose_threads(10_000).count
    assert 1 <= select_operations("cpu", num_threads=1).num_threads <= most
    assert select_operations("cpu", num_threads=10_000).num_threads == most


def test_a_wrong_number_of_threads_is_refused(native_kernels, monkeypatch):
    """Torch instead would be slow, and the reason a line in the log."""
    monkeypatch.setenv("ENGINE_CORE_NATIVE_THREADS", "many")
    with pytest.raises(UnsupportedDevice, match="ENGINE_CORE_NATIVE_THREADS is 'many'"):
        select_operations("cpu", num_threads=9_999)


def test_without_native_kernels_a_cpu_has_torch_and_one_line_says_why(no_native_kernels):
    lines = []
    assert select_operations("cpu", report=lines.append).name == "torch-cpu"
    assert len(lines) == 1
    assert "switched off by ENGINE_CORE_NATIVE=0" in lines[0]


def test_what_needs_native_kernels_is_refused_without_them(no_native_kernels):
    with pytest.raises(UnsupportedDevice, match=r"int8 needs the native .*ENGINE_CORE_NATIVE=0"):
        select_operations("cpu", float_weights="int8")
    with pytest.raises(UnsupportedDevice, match=r"--batch-invariant on a CPU needs .*NATIVE=0"):
        select_operations("cpu", batch_invariant=True)


def test_the_same_bits_in_any_batch_are_what_native_kernels_give_anyway(native_kernels):
    operations = select_operations("cpu", batch_invariant=True)
    assert operations.name == select_operations("cpu").name


def test_quantisation_at_load_is_refused_on_a_gpu(cuda):
    cuda()
    with pytest.raises(UnsupportedDevice, match=r"int4 runs on a CPU only; .*--device cpu"):
        select_operations("cuda", float_weights="int4")


def test_a_cuda_device_gets_its_number_and_triton(cuda):
    cuda(count=3)
    assert selected_device("cuda") == torch.device("cuda:2")
    assert selected_device("cuda:1") == torch.device("cuda:1")
    operations = select_operations("cuda:0", batch_invariant=True)
    assert operations.name == "triton-cuda-batch-invariant"


@pytest.mark.parametrize(
    ("machine", "device", "words"),
    [
        ({"count": 0}, "cuda", r'"cuda": torch .* sees no CUDA device; .*--device cpu'),
        ({"count": 2}, "cuda:2", r'"cuda:2": there are 2 CUDA devices, numbered from 0; choose'),
        (
            {"capability": (7, 5)},
            "cuda",
            r"\(Some GPU\) has compute capability 7\.5, .* need 8\.0 .*--device cpu",
        ),
    ],
)
def test_a_cuda_device_that_cannot_serve_is_refused_with_what_to_do(cuda, machine, device, words):
    cuda(**machine)
    with pytest.raises(UnsupportedDevice, match=words):
        select_operations(device)


def test_a_missing_triton_is_named(cuda):
    cuda()
    cuda.monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedDevice, match=r"needs triton, which is not installed; install"):
        select_operations("cuda")


def test_a_missing_c_compiler_is_named_with_its_cure(cuda, tmp_path):
    cuda()
    cuda.monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedDevice, match=r"no gcc nor clang; install one \(apt-get .*CC"):
        select_operations("cuda")
    cuda.monkeypatch.setenv("CC", "/opt/cc")
    with pytest.raises(UnsupportedDevice, match=r"no /opt/cc; .*or run with --device cpu"):
        select_operations("cuda")
    launcher = tmp_path / "cache" / "hash" / "__triton_launcher.so"
    launcher.parent.mkdir(parents=True)
    launcher.touch()  # of an earlier start, whose cache came along
    assert selected_device("cuda").index == 0


def test_missing_headers_of_python_are_named_with_their_cure(cuda, tmp_path):
    cuda()
    (tmp_path / "Python.h").unlink()
    with pytest.raises(
        UnsupportedDevice, match=r"Python\.h is missing; .*install python3\.\d+-dev"
    ):
        select_operations("cuda")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_an_fp8_cache_is_refused_below_compute_capability_8_9(cuda, capability):
    cuda(capability=capability)
    with pytest.raises(
        UnsupportedDevice, match=r"--kv-cache-dtype fp8 needs .* 8\.9 .*use --kv-cache-dtype auto"
    ):
        select_operations("cuda", fp8_cache=True)
    assert selected_device("cuda").index == 0


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_an_fp8_cache_is_taken_from_compute_capability_8_9_on(cuda, capability):
    cuda(capability=capability)
    assert select_operations("cuda", fp8_cache=True).device.index == 0


def test_another_kind_of_device_is_refused_by_name():
    with pytest.raises(UnsupportedDevice, match='"meta" is not supported; supported: "cpu" and'):
        select_operations("meta")


def test_a_gpu_keeps_quantised_weights_only_if_asked_to_and_of_types_that_it_runs(cuda):
    cuda()

    def packs(types, **options):
        operations = select_operations("cuda", quantised_types=frozenset(types), **options)
        return operations.weight_packing(torch.bfloat16) is not None

    assert packs({"Q4_K", "Q9_9"})
    assert packs({"gptq-int4"})
    assert not packs({"Q9_9"})
    assert not packs(())
    assert not packs({"Q4_K"}, keeps_blocks=False)


def test_steps_are_prepared_on_cuda_alone():
    with pytest.raises(UnsupportedDevice, match=r'"cpu" .* only "cuda" does; .*--device cuda'):
        device_step_operations(torch.device("cpu"))
