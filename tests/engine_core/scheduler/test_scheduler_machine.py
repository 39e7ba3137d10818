"""Random lives of random requests, on pools so small that everything happens.

Both compositions, all policies, every mode of preemption, samples, beams, drafts, pooled prompts,
adapters, host blocks and sliding windows at once; a paged model that reads back each slot says
whether it was right. With one step at a time, and with a step in flight while the next one is
planned. Proves S005, S023, S051, S069, S074, S075, S092, S103, S106, S107, S118, S140, S179, S180
under all orders of events.
"""

import dataclasses
import random

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle import Expected, draw_config, draw_request
from paged_device import PagedDevice
from paged_model import PagedModel

from engine_core.kv_cache import KVCacheGroupSpec, KVCacheManager
from engine_core.scheduler import ModelRunnerOutput, RequestStatus
from engine_core.scheduler.outputs import NO_CLIENT
from engine_core.scheduler.rules.fault_isolation import FaultIsolation
from engine_core.startup.scheduler import build_scheduler
from protocol.explanations import WaitReason
from protocol.outputs import FinishReason
from tests.profiles import examples
from tests.protocol.all_outputs import all_outputs

SEEDS = st.integers(0, 2**32 - 1)
FULL = KVCacheGroupSpec()
STATE = KVCacheGroupSpec(2, is_sparse=True)
GROUPS = [
    (FULL,),
    (FULL,),
    (FULL, KVCacheGroupSpec(3)),
    (FULL, KVCacheGroupSpec(5), KVCacheGroupSpec(1)),
    (KVCacheGroupSpec(4),),
    (FULL, STATE),
    (FULL, FULL, KVCacheGroupSpec(5), dataclasses.replace(STATE, pool=1)),
]


class SchedulerMachine(RuleBasedStateMachine):
    depth = 1
    is_pipeline = False

    @initialize(groups=st.sampled_from(GROUPS), seed=SEEDS)
    def start(self, groups, seed):
        """Sizes come from a seed, evenly: hypothesis itself prefers tiny ones, where little
        happens."""
        draw = random.Random(seed)
        block_size = draw.randint(1, 4)
        num_blocks = draw.randint(8, 40) * len(groups) // block_size + 1
        num_host_blocks = draw.choice([0, 0, num_blocks // 2, 2 * num_blocks])
        self._draw_depth(draw)
        self.config = draw_config(
            draw, max_steps_in_flight=self.depth, is_pipeline=self.is_pipeline
        )
        sizes, host_sizes = [num_blocks], [num_host_blocks]
        if any(spec.pool for spec in groups):
            sizes.append(draw.randint(4, 20))
            host_sizes.append(num_host_blocks // 2)
        self.kv_cache = KVCacheManager(
            num_blocks=sizes,
            block_size=block_size,
            groups=groups,
            enable_prefix_caching=draw.random() < 0.8,
            watermark=draw.choice([0.0, 0.01, 0.2]),
            num_host_blocks=host_sizes,
            checkpoint_interval=draw.choice([0, 4, 9]),
        )
        self._draw_more(draw)
        self.scheduler = build_scheduler(self.config, self.kv_cache)
        self.model = PagedModel(
            groups,
            sum(sizes),
            block_size,
            sum(host_sizes),
            computes_in_order=self.config.computes_in_order,
        )
        self.device = PagedDevice(
            self.model,
            self.depth,
            has_columns=draw.random() < 0.5,
            is_pipeline=self.is_pipeline,
        )
        self.has_groups = draw.random() < 0.6
        self.now = 0.0
        self.expected: dict[str, Expected] = {}
        self.received: dict[str, dict[int, list[int]]] = {}
        self.finished: dict[str, dict[int, FinishReason]] = {}
        self.over: set[str] = set()
        self.disturbed: set[str] = set()
        self.order: list[str] = []
        self.poison: dict[str, int] = {}
        """By request, the position whose computation makes a step fail."""
        self.num_probes = 0
        self.model.salts["probe"] = None

    def _draw_depth(self, draw):
        """Another machine has stages."""

    def _draw_more(self, draw):
        """Another machine changes the config."""

    def _draw_features(self, draw, request):
        """Another machine's prompts have images."""

    @property
    def requests(self):
        return {name: expected.request for name, expected in self.expected.items()}

    # ------------------------------------------------------------------ events

    @rule(seed=SEEDS, count=st.integers(1, 5))
    def add(self, seed, count):
        draw = random.Random(seed)
        for _ in range(count):
            name = f"r{len(self.expected)}"
            expected = draw_request(
                draw,
                name,
                max_model_len=self.config.max_model_len,
                max_num_seqs=self.config.max_num_seqs,
                now=self.now,
                policy=self.config.scheduling_policy,
                has_groups=self.has_groups,
            )
            self.expected[name] = expected
            delivered = expected.request.output_token_ids
            self.received[name] = {0: delivered} if delivered else {}
            self.finished[name] = {}
            self.model.salts[name] = (expected.request.message.cache_salt or "") + (
                expected.request.adapter or ""
            ) or None
            self._use_model_salt(expected)
            self._draw_features(draw, expected.request)
            self.scheduler.add_request(expected.request)

    def _use_model_salt(self, expected):
        """The model's keys and values depend on the adapter as well, its tokens do not."""
        name = expected.request.request_id
        self.model.token_salts[name] = expected.request.message.cache_salt

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), error=st.booleans())
    def abort(self, data, error):
        name = data.draw(st.sampled_from(sorted(self.expected)))
        status = RequestStatus.FINISHED_ERROR if error else RequestStatus.FINISHED_ABORTED
        self.scheduler.finish_requests([name, "unknown"], status)
        self.scheduler.finish_requests(name, status)
        self.disturbed.add(name)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort_sample(self, data):
        name = data.draw(st.sampled_from(sorted(self.expected)))
        index = data.draw(st.integers(0, self.requests[name].num_sequences))
        self.scheduler.finish_sample(name, index, RequestStatus.FINISHED_ABORTED)
        self.disturbed.add(name)
        self.scheduler.check()

    @rule()
    def reset_cache(self):
        num_cached = self.kv_cache.num_blocks_cached + self.kv_cache.host.num_cached
        assert self.scheduler.reset_prefix_cache() == num_cached
        assert self.kv_cache.num_blocks_cached == 0

    @rule(times=st.integers(1, 8), seed=SEEDS)
    def steps(self, times, seed):
        draw = random.Random(seed)
        for _ in range(times):
            self._launch()
            self._receive_what_is_due(wait=draw.random() < 0.2)
            num_most = draw.choice([0, 0, 4])
            for name in [name for name in self.model.row_of if name != "probe"]:
                wrong = [draw.random() < 0.3 for _ in range(draw.randint(0, num_most))]
                if self.requests[name.split("#")[0]].beam_search is None:
                    self.scheduler.update_draft_token_ids(self.model.draft(name, wrong))

    @rule(data=st.data())
    def abort_in_flight(self, data):
        plan = self._launch()
        if plan.num_scheduled_tokens:
            name = data.draw(st.sampled_from(sorted(plan.num_scheduled_tokens))).split("#")[0]
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.disturbed.add(name)
            self.scheduler.check()
        self._receive_what_is_due()

    @precondition(lambda self: not self.scheduler.parts.find(FaultIsolation).is_active)
    @rule(has_copied=st.booleans(), has_read=st.booleans())
    def failing_step(self, has_copied, has_read):
        """Once, and not again: nobody may be lost. Nothing was computed, rows were changed and
        copies were made or not."""
        self._launch(fails=True, has_copied=has_copied, has_read=has_read)
        self._receive_what_is_due()

    @precondition(lambda self: self._unfinished())
    @rule(data=st.data(), position=st.integers(0, 20))
    def poison_a_request(self, data, position):
        """From now on each step fails that computes its token at this position, or the next."""
        name = data.draw(st.sampled_from(self._unfinished()))
        self.poison[name] = position

    def _is_poisoned(self, plan):
        batch = plan.batch
        ends = (batch.num_computed_tokens + batch.num_scheduled_tokens).tolist()
        return any(
            start <= self.poison.get(name.split("#")[0], 10_000) < stop
            for name, start, stop in zip(
                batch.req_ids, batch.num_computed_tokens.tolist(), ends, strict=True
            )
        )

    def _launch(self, **failure):
        plan = self._plan()
        if self._is_poisoned(plan):
            failure = {"fails": True, "has_read": plan.step_id % 3 > 0}
        self.device.launch(plan, **failure)
        return plan

    def _receive_what_is_due(self, *, wait=False):
        for plans, sampled in self.device.collect(wait=wait):
            if sampled is None:
                self._discard(plans)
            else:
                self._receive(plans[0], sampled)

    def _discard(self, plans):
        """No request ends by this; another step may end a culprit."""
        unfinished = self._unfinished()
        self.scheduler.discard_step(plans[0], "it failed")
        for plan in plans:
            self._receive(plan, ModelRunnerOutput(req_ids=[], sampled_token_ids=[]))
        assert self._unfinished() == unfinished

    # ------------------------------------------------------------------ one step

    def _unfinished(self):
        return [name for name, request in self.requests.items() if not request.is_finished]

    def _plan(self):
        self.now += 1.0
        is_alone = len(self._unfinished()) <= 1
        plan = self.scheduler.schedule(self.now)
        counts = plan.num_scheduled_tokens
        self.num_probes += any(new.req_id == "probe" for new in plan.scheduled_new_reqs)
        assert plan.total_num_scheduled_tokens == sum(counts.values())
        if plan.num_decode_steps > 1:  # one token of each at a time
            assert max(counts.values()) == plan.num_decode_steps <= self.config.num_decode_steps
            counts = dict.fromkeys(counts, 1)
        assert sum(counts.values()) <= self.config.max_num_batched_tokens
        if self.config.max_num_shared_tokens is not None and not is_alone:
            assert sum(counts.values()) <= self.config.max_num_shared_tokens
        assert all(count > 0 for count in counts.values())
        if self.config.max_chunk_size is not None:
            for name, count in counts.items():
                drafts = len(plan.scheduled_spec_decode_tokens.get(name, ()))
                assert count - drafts <= self.config.max_chunk_size
        if plan.preempted_req_ids:
            names = [again.req_id for again in plan.resumed_reqs]
            assert all("#" in name or name in self.model.row_of for name in names)
            assert not any("#" not in new.req_id for new in plan.scheduled_new_reqs)
        self._check_order(plan)
        self._check_units(plan)
        self.scheduler.check()
        return plan

    def _check_order(self, plan):
        """Under first come, first served no request is admitted before an earlier one."""
        if self.config.scheduling_policy != "fcfs" or self.config.max_num_adapters is not None:
            return
        if self.config.max_long_partial_prefills is not None or self.kv_cache.shares_states:
            return
        new = [new.req_id for new in plan.scheduled_new_reqs if new.req_id in self.requests]
        self.order += [name for name in new if name not in self.order]
        assert self.order == sorted(self.order, key=lambda name: int(name[1:]))

    def _check_units(self, plan):
        """All sequences of a request that run are in the step, or none is, unless one of them is
        behind the others (then each gets what the composition and the budget give it)."""
        names = set(plan.num_scheduled_tokens) - {"probe"}
        for name in {name.split("#")[0] for name in names}:
            request = self.requests[name]
            placed = [seq for seq in request.unfinished if seq.row is not None]
            if self.depth > 1 and request.beam_search is None:
                continue  # samples wait for results one by one
            if all(seq.num_computed_tokens >= seq.num_tokens for seq in placed):
                assert {seq.sequence_id for seq in placed} <= names

    def _receive(self, plan, sampled):
        self.now += 0.5
        outputs_by_client = self.scheduler.update_from_output(plan, sampled, self.now)
        for client, outputs in outputs_by_client.items():
            for output in all_outputs(outputs):
                name, index = output.request_id, output.index
                assert self.requests[name].client_index == client
                assert name not in self.over, "an output behind the terminal one"
                assert index not in self.finished[name]
                self.received[name].setdefault(index, []).extend(output.new_token_ids)
                if output.finished:
                    self.finished[name][index] = output.finish_reason
                    self._check_answer(name, output)
                else:
                    assert output.new_token_ids
            for name in outputs.finished_req_ids:
                assert name not in self.over
                self.over.add(name)
                assert len(self.finished[name]) == self.requests[name].num_sequences or (
                    self.requests[name].beam_search is not None
                )
        self.scheduler.check()

    def _check_answer(self, name, output):
        received = self.received[name].get(output.index, [])
        if output.index < len(self.expected[name].outputs):
            expected = self.expected[name].outputs[output.index]
            assert received == expected[: len(received)]
            if output.detail is None and name not in self.disturbed:
                assert received == expected
        if not self.requests[name].generates and output.finish_reason == "stop":
            self._check_pooled(self.requests[name], output.pooled)
        if output.detail == "it failed":
            assert name in self.poison, "only what makes steps fail ends for it"
            assert output.finish_reason is FinishReason.ERROR
        elif output.detail is not None and name not in self.disturbed:
            assert output.finish_reason is FinishReason.LENGTH
            assert self.requests[name].status is RequestStatus.FINISHED_IGNORED

    def _check_pooled(self, request, pooled):
        """Every token was computed in the row that it ended in, if all hidden states count."""
        (num_pooled,) = pooled.rows()[0]
        assert 0 < num_pooled <= request.num_prompt_tokens
        if request.report is not None and request.report.pools_all_states:
            assert num_pooled == request.num_prompt_tokens

    # ------------------------------------------------------------------ always

    @invariant()
    def counts_are_right(self):
        unfinished = [self.requests[name] for name in self._unfinished()]
        running = [request for request in unfinished if request.status is RequestStatus.RUNNING]
        num_running, num_waiting = self.scheduler.get_request_counts()
        by_id = self.scheduler.pool.by_id.values()
        probes = [each.status for each in by_id if each.client_index == NO_CLIENT]
        assert num_running + num_waiting == len(unfinished) + len(probes)
        assert num_running == len(running) + probes.count(RequestStatus.RUNNING)
        if not num_running:
            assert self.kv_cache.num_blocks_in_use == 0
        for name in self.expected:
            info = self.scheduler.explain(name)
            assert info is not None
            assert (info.status == "finished") == self.requests[name].is_finished
            if info.waits_for is not WaitReason.ENCODER:
                assert (info.waits_for is None) == (info.status in ("finished", "running"))

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        num_tokens = sum(self.config.max_model_len for _ in self._unfinished())
        for _ in range(50 + 10 * num_tokens * self.config.max_model_len):
            if not self.scheduler.has_work() and not self.device:
                break
            self._launch()
            self._receive_what_is_due()
        assert not self.scheduler.has_work(), "a request starves"
        assert self.over == self.expected.keys()
        assert self.kv_cache.num_blocks_in_use == 0
        assert self.kv_cache.host.num_pinned == 0
        num_finished = sum(self.scheduler.statistics().num_finished.values())
        assert num_finished == len(self.expected) + self.num_probes


class SchedulerMachineAhead(SchedulerMachine):
    """Each step but the first is planned while one runs."""

    depth = 2


class SchedulerMachineInStages(SchedulerMachine):
    """Two to four micro-batches in flight, of different sequences."""

    is_pipeline = True

    def _draw_depth(self, draw):
        self.depth = draw.randint(2, 4)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachineAhead = SchedulerMachineAhead.TestCase
TestSchedulerMachineInStages = SchedulerMachineInStages.TestCase
TestSchedulerMachine.settings = TestSchedulerMachineAhead.settings = settings(
    max_examples=examples(2) * settings().max_examples,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedulerMachineInStages.settings = settings(
    TestSchedulerMachine.settings, max_examples=settings().max_examples
)
