"""Random lives of random requests, on pools so small that everything happens.

Proves S069, S074, S075, S077, S103, S107, S118, S140, S179, S180 under all orders of events.
"""

import random

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paged_model import VOCAB, PagedModel, next_token

from engine_core.kv_cache import KVCacheGroupSpec, KVCacheManager
from engine_core.scheduler import (
    FinishReason,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    Scheduler,
)
from protocol.sampling import SamplingParams

EOS = 0
SEEDS = st.integers(0, 2**32 - 1)
FULL = KVCacheGroupSpec()
GROUPS = [
    (FULL,),
    (FULL, KVCacheGroupSpec(3)),
    (FULL, KVCacheGroupSpec(5), KVCacheGroupSpec(1)),
    (KVCacheGroupSpec(4),),
]
SHARED = [[1, 2, 3, 4] * 5, [1, 2, 3, 4, 1, 2, 2, 2, 2, 2, 2, 2], [4] * 12]


def right_answer(request: Request, max_model_len: int) -> list[int]:
    """What the request gives when it is alone and never disturbed."""
    params, output = request.sampling_params, list(request.output_token_ids)
    while True:
        if output:
            if len(output) >= params.min_tokens and (
                (output[-1] == EOS and not params.ignore_eos) or output[-1] in params.stop_token_ids
            ):
                return output
            num_tokens = request.num_prompt_tokens + len(output)
            if len(output) >= params.max_tokens or num_tokens >= max_model_len:
                return output
        output.append(next_token(request.prompt_token_ids + output, request.cache_salt))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(groups=st.sampled_from(GROUPS), seed=SEEDS)
    def start(self, groups, seed):
        """Sizes come from a seed, evenly: hypothesis itself prefers tiny ones, where little
        happens."""
        draw = random.Random(seed)
        block_size = draw.randint(1, 4)
        num_blocks = draw.randint(8, 40) * len(groups) // block_size + 1
        self.budget = draw.randint(1, 16)
        self.max_num_seqs = draw.randint(1, 5)
        self.max_chunk = draw.choice([None, None, draw.randint(1, 6)])
        self.max_model_len = draw.randint(6, 44)
        self.kv_cache = KVCacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            groups=groups,
            enable_prefix_caching=draw.random() < 0.8,
            watermark=draw.choice([0.0, 0.01, 0.2]),
        )
        self.scheduler = Scheduler(
            kv_cache=self.kv_cache,
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            max_chunk_size=self.max_chunk,
        )
        self.model = PagedModel(groups, num_blocks, block_size)
        self.requests: dict[str, Request] = {}
        self.expected: dict[str, list[int]] = {}
        self.received: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.disturbed: set[str] = set()
        self.order: list[str] = []

    # ------------------------------------------------------------------ events

    @rule(seed=SEEDS, count=st.integers(1, 5))
    def add(self, seed, count):
        draw = random.Random(seed)
        for _ in range(count):
            self._add_one(draw)

    def _add_one(self, draw):
        name = f"r{len(self.requests)}"
        prefix = draw.choice(SHARED)[: draw.choice([0, 3, 8, self.max_model_len // 2])]
        own = [draw.randint(1, VOCAB - 1) for _ in range(draw.randint(1, 3))]
        max_tokens = draw.randint(1, 16)
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=draw.randint(0, max_tokens),
            ignore_eos=draw.random() < 0.7,
            stop_token_ids=draw.choice([(), (), (3,)]),
        )
        salt = draw.choice([None, None, None, "a", "b"])
        client = draw.randint(0, 2)

        def build(output_token_ids):
            return Request(
                request_id=name,
                prompt_token_ids=prefix + own,
                sampling_params=params,
                client_index=client,
                eos_token_ids=(EOS,),
                cache_salt=salt,
                output_token_ids=output_token_ids,
            )

        answer = right_answer(build([]), self.max_model_len)
        request = build(answer[: draw.choice([0, 0, 0, 2])])
        self.requests[name] = request
        self.expected[name] = answer
        self.received[name] = list(request.output_token_ids)
        self.model.salts[name] = salt
        self.scheduler.add_request(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), error=st.booleans())
    def abort(self, data, error):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        status = RequestStatus.FINISHED_ERROR if error else RequestStatus.FINISHED_ABORTED
        self.scheduler.finish_requests([name, "unknown"], status)
        self.scheduler.finish_requests(name, status)
        self.disturbed.add(name)

    @rule()
    def reset_cache(self):
        num_cached = self.kv_cache.num_blocks_cached
        assert self.scheduler.reset_prefix_cache() == num_cached
        assert self.kv_cache.num_blocks_cached == 0

    @rule(times=st.integers(1, 8), seed=SEEDS)
    def steps(self, times, seed):
        draw = random.Random(seed)
        for _ in range(times):
            self._step()
            self._speculate(draw)

    def _speculate(self, draw):
        num_most = draw.choice([0, 4])
        for name in self.model.rows:
            wrong = [draw.random() < 0.3 for _ in range(draw.randint(0, num_most))]
            self.scheduler.update_draft_token_ids(self.model.draft(name, wrong))

    @rule(data=st.data())
    def abort_in_flight(self, data):
        plan = self._plan()
        sampled = self.model.execute(plan)
        if plan.num_scheduled_tokens:
            name = data.draw(st.sampled_from(sorted(plan.num_scheduled_tokens)))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.disturbed.add(name)
            self.kv_cache.check()
        self._receive(plan, sampled)

    @rule()
    def failing_step(self):
        plan = self._plan()
        self.model._follow(plan)  # the rows were changed, nothing was computed
        self.scheduler.discard_step(plan, "it failed")
        self.disturbed.update(plan.num_scheduled_tokens)
        self._receive(plan, ModelRunnerOutput(req_ids=[], sampled_token_ids=[]))
        assert not set(plan.num_scheduled_tokens) & set(self._live())

    # ------------------------------------------------------------------ one step

    def _live(self):
        return [name for name, request in self.requests.items() if not request.is_finished]

    def _step(self):
        plan = self._plan()
        self._receive(plan, self.model.execute(plan))
        return plan

    def _plan(self):
        plan = self.scheduler.schedule()
        counts = plan.num_scheduled_tokens
        assert plan.total_num_scheduled_tokens == sum(counts.values()) <= self.budget
        assert self.scheduler.get_request_counts()[0] <= self.max_num_seqs
        assert all(count > 0 for count in counts.values())
        if self.max_chunk is not None:
            for name, count in counts.items():
                drafts = len(plan.scheduled_spec_decode_tokens.get(name, ()))
                assert count - drafts <= self.max_chunk
        if plan.preempted_req_ids:
            assert not plan.scheduled_new_reqs
            assert not any(plan.scheduled_cached_reqs.resumed_from_preemption)
        # nobody is admitted before who came earlier
        for new in plan.scheduled_new_reqs:
            self.order.append(new.req_id)
        assert self.order == sorted(self.order, key=lambda name: int(name[1:]))
        self.kv_cache.check(
            request for request in self.requests.values() if request.status is RequestStatus.RUNNING
        )
        return plan

    def _receive(self, plan, sampled):
        for client, outputs in self.scheduler.update_from_output(plan, sampled).items():
            finished = []
            for output in outputs.outputs:
                name = output.request_id
                assert self.requests[name].client_index == client
                assert name not in self.ended, "an output behind the terminal one"
                self.received[name] += output.new_token_ids
                if output.finished:
                    finished.append(name)
                    self.ended[name] = output.finish_reason
                    self._check_answer(name, output)
                else:
                    assert output.new_token_ids
            assert finished == outputs.finished_req_ids

    def _check_answer(self, name, output):
        received, expected = self.received[name], self.expected[name]
        assert received == expected[: len(received)]
        if output.detail is None and name not in self.disturbed:
            assert received == expected
            stopped = output.finish_reason is FinishReason.STOP
            assert stopped == (self.requests[name].status is RequestStatus.FINISHED_STOPPED)
        elif name not in self.disturbed:
            assert output.finish_reason is FinishReason.LENGTH
            assert self.requests[name].status is RequestStatus.FINISHED_IGNORED

    # ------------------------------------------------------------------ always

    @invariant()
    def counts_are_right(self):
        live = [self.requests[name] for name in self._live()]
        running = [request for request in live if request.status is RequestStatus.RUNNING]
        self.kv_cache.check(running)
        assert self.scheduler.get_request_counts() == (len(running), len(live) - len(running))
        for request in running:
            assert request.num_tokens - request.num_computed_tokens >= 1
        if not running:
            assert self.kv_cache.num_blocks_in_use == 0

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        num_tokens = sum(self.max_model_len for _ in self._live())
        for _ in range(20 + 4 * num_tokens * self.max_model_len):
            if not self.scheduler.has_work():
                break
            self._step()
        assert not self.scheduler.has_work(), "somebody starves"
        assert self.ended.keys() == self.requests.keys()
        assert self.kv_cache.num_blocks_in_use == 0
        assert sum(self.scheduler.statistics().num_finished.values()) == len(self.requests)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
