"""Sequences with adapters on both runners: each gets in any batch the tokens that it gets alone."""

import torch
from fake_device import make_operations, make_queue, make_steps
from plans import Drive
from runners import load_reference, runner_config, spoiled

from engine_core.adapters.pool import AdapterPool
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.model_runner.gpu import GPUModelRunner
from kernels.interface.lora import LoRAPart
from kernels.torch.operations import TorchOperations
from protocol.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=99, temperature=0.0)
ADAPTERS = {"a": "x", "b": None, "c": "y", "d": "x", "e": None}
PROMPTS = {name: list(range(start, start + 9)) for start, name in enumerate("abcde")}


def config_with_adapters(reference, ops):
    """A runner's configuration; adapters "x" and "y" are in slots 0 and 1."""
    model = load_reference(reference, ops)
    pool = AdapterPool(model, ops, num_slots=2, max_rank=4, max_num_tokens=96, dtype=torch.float32)
    for slot, key in enumerate("xy"):
        generator = torch.Generator().manual_seed(slot)
        prepared = {}
        for index, linear in enumerate(model.linears):
            sizes = [size for _, size in linear.parts]
            parts = {
                number: LoRAPart(
                    torch.randn(3, linear.num_inputs, generator=generator) * 0.4,
                    torch.randn(size, 3, generator=generator) * 0.4,
                )
                for number, size in enumerate(sizes)
            }
            prepared[index] = parts
        pool.place(slot, key, pool.prepare(prepared))
    return runner_config(model, ops, adapters=pool, max_num_batched_tokens=96)


def tokens_of(runner, names):
    drive = Drive(runner)
    drive.plans.adapters = {name: key for name, key in ADAPTERS.items() if key is not None}
    for name in names:
        drive.add(name, PROMPTS[name], GREEDY)
    drive.step({name: 5 + number % 2 for number, name in enumerate(names)})
    drive.step({name: 4 - number % 2 for number, name in enumerate(names)})
    drive.decode(*names, steps=3)
    for name in names[::2]:
        drive.plans.preempt(name)
        drive.plans.resume(name, drive.tokens[name])
    drive.step({name: len(drive.tokens[name]) if name in names[::2] else 1 for name in names})
    drive.decode(*names, steps=2)
    if plain := [name for name in names if ADAPTERS[name] is None]:
        drive.decode(*plain)  # a step in which no row has an adapter
    return drive.tokens


def test_tokens_with_adapters_are_those_of_each_sequence_alone_on_both_runners(reference):
    """Proves S025, S129: a preempted sequence comes back with its adapter."""
    names = list(ADAPTERS)
    ops = make_operations()
    host = TorchOperations()
    cpu = spoiled(CPUModelRunner(config_with_adapters(reference, host)))
    alone = {}
    for name in names:
        alone |= tokens_of(spoiled(CPUModelRunner(config_with_adapters(reference, host))), [name])
    assert tokens_of(cpu, names) == alone
    for use_graphs in (True, False):
        device = GPUModelRunner(
            config_with_adapters(reference, ops),
            steps=make_steps(),
            queue=make_queue(),
            use_graphs=use_graphs,
        )
        device.warm_up()
        assert tokens_of(spoiled(device), names) == alone
        with_adapters = [key for key in device.graphs.all if key.has_parts]
        assert all(key in device.graphs for key in device.graphs.at_start)
        assert bool(with_adapters) == use_graphs
