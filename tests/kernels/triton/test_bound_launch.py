"""Launches are bound once for equal layouts and options; kernels are stood in for."""

import torch

from kernels.triton.bound_launch import BoundLaunches, Launch


class Compiled:
    def __init__(self, calls, number):
        self.calls, self.number = calls, number

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append((self.number, grid, arguments))


class Kernel:
    """`arg_names` in the order of the signature; each binding compiles anew."""

    arg_names = ("x_ptr", "out_ptr", "stride", "B", "A", "PDL")

    def __init__(self, *, is_interpreted=False):
        self.bound, self.called, self.is_interpreted = [], [], is_interpreted

    def __getitem__(self, grid):
        def bind(*arguments, **constants):
            self.bound.append((grid, arguments, constants))
            return None if self.is_interpreted else Compiled(self.called, len(self.bound))

        return bind


CONSTANTS = {"A": 1, "B": 2, "num_warps": 4, "PDL": False}


def launch_on(launches, x, *, options=None, counts=None):
    def prepare():
        if counts is not None:
            counts.append(1)
        return Launch((3, 5), (x.stride(0),), CONSTANTS)

    out = torch.empty(len(x), 4)
    launches((x, out), options, prepare)
    return x, out


def test_equal_layouts_are_checked_and_bound_once_and_called_in_the_signatures_order():
    kernel, counts = Kernel(), []
    launches = BoundLaunches(kernel)
    launch_on(launches, torch.empty(2, 4), counts=counts)
    tensors = launch_on(launches, torch.empty(2, 4), counts=counts)
    assert len(counts) == len(kernel.bound) == 1
    assert kernel.bound[0][0] == (3, 5) and kernel.bound[0][2] == CONSTANTS
    ((number, grid, arguments),) = kernel.called
    assert (number, grid) == (1, (3, 5, 1))
    assert all(given is tensor for given, tensor in zip(arguments, tensors, strict=False))
    assert arguments[2:] == (4, 2, 1, False)


def test_whatever_may_compile_another_kernel_is_bound_anew():
    kernel = Kernel()
    launches = BoundLaunches(kernel)
    wide = torch.empty(3, 8)
    for x in (
        torch.empty(2, 4),
        torch.empty(3, 4),
        wide[:, :4],
        torch.empty(2, 4, dtype=torch.float16),
        torch.empty(9)[1:].view(2, 4),  # at an address that is no multiple of 16
    ):
        launch_on(launches, x)
    launch_on(launches, torch.empty(2, 4), options=("scale", 0.5))
    assert len(kernel.bound) == 6 and not kernel.called
    launch_on(launches, torch.empty(9)[1:].view(2, 4))
    assert [number for number, *_ in kernel.called] == [5]


def test_interpreted_launches_are_checked_every_time_and_the_oldest_are_forgotten():
    kernel, counts = Kernel(is_interpreted=True), []
    for _ in range(2):
        launch_on(BoundLaunches(kernel), torch.empty(2, 4), counts=counts)
    assert len(counts) == 2
    kernel = Kernel()
    launches = BoundLaunches(kernel, most=2)
    for rows in (1, 2, 3, 1):
        launch_on(launches, torch.empty(rows, 4))
    assert len(kernel.bound) == 4
