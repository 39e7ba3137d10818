"""The real scheduler over a runner, one step in flight or none; keeps what each sequence was given.

Uses only what a runner's interface offers.
"""

import collections

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler import RequestStatus, SchedulerConfig
from engine_core.startup.scheduler import build_scheduler
from tests.engine_core.new_request import new_request
from tests.protocol.all_outputs import all_outputs


def few_blocks(reference):
    """So many that eight sequences of 60 tokens do not fit; windows need fewer."""
    has_windows = getattr(reference.config, "sliding_window", None) is not None
    return {"num_blocks": 75 if has_windows else 28, "num_host_blocks": 60}


def make_scheduler(
    layout, *, num_blocks, num_host_blocks, swap, depth=1, checkpoint_interval=0, **options
):
    mode = "swap" if swap else "recompute"
    return build_scheduler(
        SchedulerConfig(preemption_mode=mode, max_steps_in_flight=depth, **options),
        KVCacheManager(
            num_blocks=num_blocks,
            block_size=4,
            watermark=0.0,
            groups=layout.group_specs,
            num_host_blocks=num_host_blocks,
            checkpoint_interval=checkpoint_interval,
        ),
    )


class EngineLoop:
    """submit before collect, as the engine's loop does it with `depth` steps in flight."""

    def __init__(self, scheduler, runner, *, depth):
        self.scheduler, self.runner, self.depth = scheduler, runner, depth
        self.open = collections.deque()
        self.tokens = collections.defaultdict(list)
        """By (request id, index of its sequence)."""
        self.prompt_logprobs = collections.defaultdict(list)
        self.num_cached_tokens = {}
        self.logprobs = collections.defaultdict(list)
        """Likewise: ranks, and tokens and values as bytes, a position each."""
        self.logprob_bytes = collections.defaultdict(list)
        self.ends = {}
        self.pooled = {}
        """By request id: shape and bytes."""
        self.num_ahead = 0

    def add(
        self,
        name,
        prompt,
        params,
        *,
        num_sequences=1,
        beam_search=None,
        priority=0,
        prompt_embeds=(),
        **more,
    ):
        self.scheduler.add_request(
            new_request(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=params,
                num_sequences=num_sequences,
                beam_search=beam_search,
                eos_token_ids=(7,),
                priority=priority,
                **more,
                prompt_embeds=prompt_embeds,
                content_spans=[span for rows in prompt_embeds for span in rows.content_spans(4)],
            )
        )

    def abort(self, name):
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self):
        """Plan and launch; then take in the oldest step if no other may be launched behind it."""
        plan = self.scheduler.schedule()
        self.num_ahead += bool(self.open) and plan.total_num_scheduled_tokens > 0
        self.runner.submit(plan)
        self.open.append(plan)
        if len(self.open) == self.depth or not plan.total_num_scheduled_tokens:
            self.take_in()

    def take_in(self):
        plan = self.open.popleft()
        outputs = self.scheduler.update_from_output(plan, self.runner.collect())
        self.scheduler.check()
        self.runner.rows.check()
        for output in (output for each in outputs.values() for output in all_outputs(each)):
            place = (output.request_id, output.index)
            self.tokens[place] += output.new_token_ids
            if output.prompt_logprobs is not None:
                assert not self.tokens[place], "before the first token"
                self.prompt_logprobs[output.request_id].append(output.prompt_logprobs)
            if output.num_cached_tokens is not None:
                self.num_cached_tokens[output.request_id] = output.num_cached_tokens
            if output.logprobs is not None:
                report, width = output.logprobs, 4 * output.logprobs.width
                self.logprobs[place] += report.ranks
                for at in range(0, width * report.num_positions, width):
                    cell = slice(at, at + width)
                    self.logprob_bytes[place].append(
                        (report.token_ids[cell], report.logprobs[cell])
                    )
            if output.pooled is not None:
                self.pooled[output.request_id] = output.pooled
            if output.finish_reason is not None:
                assert place not in self.ends, "ended twice"
                self.ends[place] = output.finish_reason

    def finish(self):
        """Run until no request is left."""
        for _ in range(2000):
            if not self.scheduler.has_work() and not self.open:
                return
            if self.scheduler.has_work():
                self.step()
            else:
                self.take_in()
        raise AssertionError("2000 steps and requests are left")
