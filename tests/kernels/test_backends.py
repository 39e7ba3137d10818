"""Which backend serves a device, and what is said where none does. No device is touched."""

import importlib.util

import pytest
import torch

from kernels.backends import UnsupportedDevice, select_operations


@pytest.fixture
def cuda(monkeypatch):
    """(count, capability) -> a machine that says it has such devices."""

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


def test_the_cpu_has_torch():
    assert select_operations("cpu").name == "torch-cpu"
    assert select_operations(torch.device("cpu")).device == torch.device("cpu")


def test_batch_invariance_on_a_cpu_is_refused_and_what_holds_is_said():
    with pytest.raises(UnsupportedDevice, match=r"--batch-invariant on a CPU .*--device cuda"):
        select_operations("cpu", batch_invariant=True)


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


def test_another_kind_of_device_is_refused_by_name():
    with pytest.raises(UnsupportedDevice, match='"meta" is not supported; supported: "cpu" and'):
        select_operations("meta")
