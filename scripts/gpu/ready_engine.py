"""An engine with random weights of a published shape, and plans by hand for exactly one step.

Owns which engine is on the device: one at a time. Needs msgspec (see `scripts.gpu.wheels`). Must
not know how steps are timed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import torch

from engine_core.kv_cache import CacheCopies
from engine_core.models import load_dummy_model
from engine_core.scheduler import NewRequestData, ScheduledBatch, SchedulerOutput
from kernels.interface.device_steps import SamplingMode
from protocol.sampling import SamplingParams
from scripts.gpu.engine_run import BLOCK_SIZE, Asked, EngineRun, Sizes, triton_operations
from scripts.gpu.model_shapes import Shape


class ReadyEngine:
    """
    Args:
        shape: of the model.
        sizes: one that the scheduler is made for too.
        dtype: of weights, activations and the cache.
    """

    def __init__(self, shape: Shape, sizes: Sizes, *, dtype: torch.dtype, device: str) -> None:
        ops = triton_operations(device)
        model = load_dummy_model(shape, dtype=dtype, ops=ops, max_model_len=sizes.max_model_len)
        self.engine = EngineRun(model, ops, sizes, dtype=dtype)
        self.vocab_size = model.kv_cache_spec.vocab_size
        for keys, values in self.engine.runner.storage.device_tensors:
            keys.normal_()  # zeros run faster than real data
            values.normal_()
        self._present: list[str] = []
        self._num_steps = 0

    def decode(self, batch: int, context: int) -> Callable[[], object]:
        """What replays a decode step of `batch` sequences of `context` tokens on the current
        stream, again and again the same one."""
        runner = self.engine.runner
        runner.execute(self._plan([(context, context - 1)] * batch))
        return runner.graphs.get(batch, SamplingMode.PLAIN)

    def prefill(self, num_tokens: int) -> Callable[[], object]:
        """What computes a prompt in one step and waits for it."""
        plan = self._plan([(num_tokens, 0)])
        return lambda: self.engine.runner.execute(plan)

    def time_decodes(self, batch: int, context: int, num_steps: int) -> dict[str, float]:
        """The real scheduler with a step in flight, by the clock on the wall: milliseconds a step,
        and how many of them the host is at work (planning, launching, taking in)."""
        runner, engine = self.engine.runner, self.engine
        runner.execute(self._plan([]))
        names = [f"timed {at}" for at in range(batch)]
        for name in names:
            prompt = torch.randint(self.vocab_size, (context,)).tolist()
            engine.add(Asked(name, prompt, num_steps + batch, temperature=1.0))
        while not all(engine.answers[name].tokens for name in names):
            engine.step()
        for _ in range(3):  # the first records the graph
            engine.step()
        before, engine.host_s = sum(len(engine.answers[name].tokens) for name in names), 0.0
        started_s = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        seconds = time.perf_counter() - started_s
        host_s = engine.host_s
        num_tokens = sum(len(engine.answers[name].tokens) for name in names) - before
        engine.abort(names)
        return {
            "step_ms": round(1e3 * seconds / num_steps, 3),
            "host_ms": round(1e3 * host_s / num_steps, 3),
            "output_tok_s": round(num_tokens / seconds, 1),
        }

    def _plan(self, sequences: list[tuple[int, int]]) -> SchedulerOutput:
        """New sequences of (tokens, of which computed), instead of those that were there."""
        finished, self._present = self._present, []
        new, first_block = [], 1
        for row, (length, computed) in enumerate(sequences):
            width = -(-length // BLOCK_SIZE)
            assert first_block + width <= self.engine.sizes.num_blocks + 1, "too few blocks"
            blocks = list(range(first_block, first_block + width))
            first_block += width
            new.append(
                NewRequestData(
                    req_id=f"by hand {self._num_steps} {row}",
                    prompt_token_ids=torch.randint(self.vocab_size, (length,)).tolist(),
                    output_token_ids=[],
                    mm_features=[],
                    sampling_params=SamplingParams(max_tokens=1, temperature=1.0, seed=row),
                    block_ids=tuple(blocks for _ in range(self.engine.num_groups)),
                    num_computed_tokens=computed,
                    lora_request=None,
                    row=row,
                )
            )
        self._present = [data.req_id for data in new]
        self._num_steps += 1
        table = np.array(sequences, np.int32).reshape(-1, 2)
        return SchedulerOutput(
            step_id=self._num_steps,
            batch=ScheduledBatch(
                req_ids=self._present,
                rows=np.arange(len(new), dtype=np.int32),
                num_computed_tokens=table[:, 1],
                num_scheduled_tokens=table[:, 0] - table[:, 1],
            ),
            scheduled_new_reqs=new,
            resumed_reqs=[],
            block_updates=[],
            copies=CacheCopies(),
            total_num_scheduled_tokens=int((table[:, 0] - table[:, 1]).sum()),
            scheduled_spec_decode_tokens={},
            finished_req_ids=finished,
            preempted_req_ids=[],
            num_output_tokens=np.zeros(len(new), np.int32),
        )


_ON_DEVICE: dict[str, ReadyEngine] = {}


def engine_of(name: str, make: Callable[[], ReadyEngine]) -> ReadyEngine:
    """The engine of that name; another one is taken off the device first."""
    if name not in _ON_DEVICE:
        _ON_DEVICE.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        _ON_DEVICE[name] = make()
    return _ON_DEVICE[name]
