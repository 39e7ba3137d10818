"""A model of keys and states, whose blocks are of two sizes: the engine's tokens are those of a
plain computation, whatever runs beside a sequence and whatever becomes of its blocks."""

import pytest
import torch
from engine_loop import EngineLoop, make_scheduler
from gpu.fake_device import LateQueue
from runners import runner_config, spoiled
from state_model import KEYS, StateModel, state_of

from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.model_runner.gpu import GPUModelRunner
from kernels.torch.operations import TorchOperations
from protocol.sampling import SamplingParams
from tests.kernels.torch_device_steps import TorchDeviceSteps

ONE_POOL, TWO_POOLS = 10, 112
"""Sizes of a state: with rows about that of four tokens' keys and values, and not."""
NUMBER = 14
PROMPTS = {"a": 23, "b": 22, "c": 9, "d": 31, "e": 1, "f": 8, "g": 16, "again": 31, "other": 40}
"""Lengths; all begin alike but the last, some part before they end."""


def kept_by(order, size):
    return tuple(KEYS if each == "k" else state_of(size) for each in order)


def prompts():
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(8, 61, (31,), generator=generator).tolist()
    own = {name: shared[:length] for name, length in PROMPTS.items()}
    own["b"][20:] = [9, 10]
    own["other"] = torch.randint(8, 61, (40,), generator=generator).tolist()
    return own


@pytest.fixture(scope="module")
def expected():
    """By model and name."""
    found = {}

    def of(model, name):
        key = model.spec.layers, name
        if key not in found:
            found[key] = model.greedy(prompts()[name], NUMBER)
        return found[key]

    return of


class Loop:
    """`chunk`: most tokens of a sequence in a step. `on_device`: a step in flight on a late one."""

    def __init__(
        self,
        order="ks",
        size=TWO_POOLS,
        *,
        blocks,
        swap=False,
        chunk=64,
        max_num_seqs=4,
        on_device=False,
        **options,
    ):
        self.model = StateModel(kept_by(order, size), size)
        sizes = {
            "num_blocks": blocks,
            "num_host_blocks": 40 if isinstance(blocks, int) else (40, 30),
        }
        limits = {
            "max_num_batched_tokens": max(chunk, max_num_seqs),
            "max_num_seqs": max_num_seqs,
            "max_model_len": 64,
        }
        config = runner_config(self.model, TorchOperations(), **sizes, **limits)
        self.layout, depth = config.layout, 2 if on_device else 1
        if on_device:
            runner = GPUModelRunner(
                config, steps=TorchDeviceSteps(), queue=LateQueue(), use_graphs=False
            )
        else:
            runner = CPUModelRunner(config)
        scheduler = make_scheduler(
            config.layout,
            swap=swap,
            depth=depth,
            max_chunk_size=chunk,
            **sizes,
            **limits,
            **options,
        )
        self.loop = EngineLoop(scheduler, spoiled(runner), depth=depth)

    def add(self, name, **more):
        params = SamplingParams(max_tokens=NUMBER, temperature=0.0, ignore_eos=True)
        self.loop.add(name, prompts()[name], params, **more)


def test_blocks_of_a_state_have_a_pool_and_a_table_of_their_own():
    layout = Loop(blocks=(40, 20)).layout
    assert [(group.layers, group.spec.pool) for group in layout.groups] == [((0,), 0), ((1,), 1)]
    assert layout.pool_bytes == (4 * 2 * 8 * 4, 2368)
    assert layout.group_specs[1].is_sparse


@pytest.mark.parametrize("chunk", [1, 7, 23])
@pytest.mark.parametrize(
    ("order", "size"), [("ks", TWO_POOLS), ("sk", TWO_POOLS), ("sks", TWO_POOLS), ("ks", ONE_POOL)]
)
def test_a_sequence_has_the_same_tokens_alone_in_any_chunks(order, size, chunk, expected):
    own = Loop(
        order, size, blocks=(40, 20) if size == TWO_POOLS else 60, chunk=chunk, max_num_seqs=1
    )
    assert len(own.layout.pool_bytes) == (2 if size == TWO_POOLS else 1)
    own.add("d")
    own.loop.finish()
    assert own.loop.tokens["d", 0] == expected(own.model, "d")


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize(("swap", "on_device"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("order", "size", "blocks", "is_preempted"),
    [
        ("ks", TWO_POOLS, (90, 60), False),
        ("ks", TWO_POOLS, (16, 60), True),
        ("ks", TWO_POOLS, (90, 16), False),
        ("sks", TWO_POOLS, (16, 18), True),
        ("sks", ONE_POOL, 60, False),
    ],
)
def test_a_crowd_has_the_same_tokens_with_few_blocks_of_either_kind(
    order, size, blocks, is_preempted, swap, on_device, chunk, expected
):
    own = Loop(order, size, blocks=blocks, swap=swap, chunk=chunk, on_device=on_device)
    for name in PROMPTS:
        own.add(name)
        own.loop.step()
        own.loop.step()
    own.loop.finish()
    for name in PROMPTS:
        assert own.loop.tokens[name, 0] == expected(own.model, name), name
    counts = own.loop.scheduler.pool.counters
    assert (counts.num_preemptions > 0) == is_preempted
    if swap and is_preempted and not on_device:
        assert counts.num_preemptions_by_swap
    assert sum(own.loop.num_cached_tokens.values()) >= 8


@pytest.mark.parametrize(
    ("interval", "found"),
    [
        (0, {"d": 0, "b": 0, "a": 20, "g": 0, "c": 0, "again": 28}),
        (8, {"d": 0, "b": 16, "a": 20, "g": 8, "c": 8, "again": 28}),
    ],
)
def test_a_prefix_is_found_where_there_is_a_state(interval, found, expected):
    """Every so many tokens, before a prompt's end, and behind what one had of another's keys."""
    own = Loop(blocks=(60, 40), checkpoint_interval=interval)
    for name, num_found in found.items():
        own.add(name)
        own.loop.finish()
        assert own.loop.num_cached_tokens[name] == num_found
        assert own.loop.tokens[name, 0] == expected(own.model, name)


@pytest.mark.parametrize("blocks", [(90, 60), (30, 14)])
@pytest.mark.parametrize("swap", [False, True])
def test_samples_of_one_prompt_fork_its_state(blocks, swap, expected):
    own = Loop(blocks=blocks, swap=swap, max_num_seqs=6)
    own.add("a", num_sequences=3)
    own.add("b", num_sequences=3)
    own.loop.finish()
    for name in "ab":
        for index in range(3):
            assert own.loop.tokens[name, index] == expected(own.model, name)


def test_random_samples_are_those_of_a_loop_with_room():
    """Each forks the state, and goes on from it by itself."""
    found = []
    for blocks, swap in (((90, 60), False), ((30, 14), False), ((30, 14), True)):
        own = Loop(blocks=blocks, swap=swap, max_num_seqs=6)
        params = SamplingParams(max_tokens=NUMBER, temperature=1.5, seed=5, ignore_eos=True)
        for name in "abd":
            own.loop.add(name, prompts()[name], params, num_sequences=3)
        own.loop.finish()
        found.append(dict(own.loop.tokens))
    assert found[0] == found[1] == found[2]
    assert len({tuple(tokens) for tokens in found[0].values()}) == 9


def test_what_is_evicted_comes_back_from_host_memory(expected):
    own = Loop(blocks=(16, 4), max_num_seqs=1)
    for name, num_found in (("d", 0), ("other", 0), ("again", 28)):
        own.add(name)
        own.loop.finish()
        assert own.loop.num_cached_tokens[name] == num_found
        assert own.loop.tokens[name, 0] == expected(own.model, name)
