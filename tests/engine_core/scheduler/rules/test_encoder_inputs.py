"""Images in prompts: which are encoded in a step, what is kept, and that no request waits for ever.

Proves S021 and S221 for the scheduler."""

import dataclasses

import pytest
from driving import Drive, make_request, make_scheduler
from hypothesis import HealthCheck, settings
from test_scheduler_machine import SchedulerMachine

from engine_core.scheduler import ModelRunnerOutput, RequestStatus
from engine_core.scheduler.records.prompt_content import MultiModalFeature, PromptContent
from protocol.explanations import WaitReason
from tests.profiles import examples


def image(start, count, name=b"a", num_rows=None):
    return MultiModalFeature("image", start, start + count, num_rows or count, name)


def with_images(request, *images):
    request.content = PromptContent(features=images)
    return request


class Outputs:
    """What a model runner keeps, from plans alone."""

    def __init__(self, budget, capacity):
        self.budget, self.capacity = budget, capacity
        self.rows: dict[bytes, int] = {}

    def follow(self, plan, features_of, *, has_failed=False):
        """A step that fails has encoded all, or nothing."""
        for name in plan.free_encoder_mm_hashes:
            self.rows.pop(name, None)
        encoded = 0
        for req_id, indexes in plan.scheduled_encoder_inputs.items():
            for index in indexes:
                each = features_of(req_id)[index]
                encoded += each.num_rows
                assert has_failed or each.identifier not in self.rows, "encoded twice"
                if not has_failed or plan.step_id % 2:
                    self.rows[each.identifier] = each.num_rows
        assert encoded <= self.budget
        assert has_failed or sum(self.rows.values()) <= self.capacity
        if has_failed:
            return
        batch = plan.batch
        for name, first, count in zip(
            batch.req_ids, batch.num_computed_tokens, batch.num_scheduled_tokens, strict=True
        ):
            for each in features_of(name):
                if each.start < first + count and first < each.stop:
                    assert each.identifier in self.rows, "it runs without its image"


class Scenario(Drive):
    def __init__(self, *requests, encoder_budget=8, cache=8, **settings):
        scheduler = make_scheduler(
            max_num_encoder_input_tokens=encoder_budget, encoder_cache_size=cache, **settings
        )
        self.kept = Outputs(encoder_budget, cache)
        super().__init__(scheduler, *requests)

    def step(self, **tokens):
        plan = super().step(**tokens)
        by_id = {request.request_id: request for request in self.requests}
        self.kept.follow(plan, lambda name: by_id[name].content.features)
        self.scheduler.check()
        return plan


def counts(plan):
    return plan.num_scheduled_tokens


def test_a_chunk_stops_before_an_image_that_the_steps_budget_does_not_hold():
    scenario = Scenario(encoder_budget=8, cache=100)
    images = image(2, 6, b"a"), image(10, 6, b"b")
    scenario.add(with_images(make_request("r", 20), *images))
    plan = scenario.step()
    assert counts(plan) == {"r": 10}
    assert plan.scheduled_encoder_inputs == {"r": [0]}
    plan = scenario.step()
    assert counts(plan) == {"r": 10}
    assert plan.scheduled_encoder_inputs == {"r": [1]}
    assert scenario.step().scheduled_encoder_inputs == {}


def test_the_images_of_two_requests_share_a_steps_budget():
    scenario = Scenario(encoder_budget=4, cache=100)
    for name in "rs":
        scenario.add(with_images(make_request(name, 5), image(0, 4, name.encode())))
    encoded = [scenario.step().scheduled_encoder_inputs for _ in range(2)]
    assert encoded == [{"r": [0]}, {"s": [0]}]


def test_an_image_may_be_computed_in_chunks_and_is_encoded_once():
    scenario = Scenario(budget=4)
    scenario.add(with_images(make_request("r", 10), image(1, 8)))
    plans = [scenario.step() for _ in range(3)]
    assert [counts(plan)["r"] for plan in plans] == [4, 4, 2]
    assert [plan.scheduled_encoder_inputs for plan in plans] == [{"r": [0]}, {}, {}]


def test_equal_images_share_an_output_that_stays_until_its_room_is_wanted():
    scenario = Scenario(encoder_budget=8, cache=12)
    scenario.add(with_images(make_request("r", 10), image(1, 8, b"a")))
    scenario.add(with_images(make_request("s", 10), image(1, 8, b"a")))
    plan = scenario.step()
    assert counts(plan) == {"r": 10, "s": 10}
    assert plan.scheduled_encoder_inputs == {"r": [0]}
    scenario.add(with_images(make_request("t", 10), image(0, 8, b"a")))
    assert scenario.step().scheduled_encoder_inputs == {}
    scenario.add(with_images(make_request("u", 10), image(0, 8, b"b")))
    plan = scenario.step()
    assert plan.scheduled_encoder_inputs == {"u": [0]}
    assert plan.free_encoder_mm_hashes == [b"a"]
    statistics = scenario.scheduler.statistics()
    assert (statistics.num_encoder_inputs, statistics.num_encoder_cache_hits) == (2, 2)
    assert statistics.num_encoder_cache_tokens == 8


def test_a_request_whose_image_has_no_room_waits_and_says_why():
    scenario = Scenario(encoder_budget=8, cache=8, budget=12)
    scenario.add(with_images(make_request("r", 30), image(4, 8, b"a")))
    scenario.add(with_images(make_request("s", 5), image(0, 3, b"b")))
    scenario.scheduler.schedule()
    info = scenario.scheduler.explain("s")
    assert info.waits_for is WaitReason.TOKEN_BUDGET
    scenario = Scenario(encoder_budget=8, cache=8, budget=12, max_chunk_size=6)
    scenario.add(with_images(make_request("r", 30), image(4, 8, b"a")))
    scenario.add(with_images(make_request("s", 5), image(0, 3, b"b")))
    scenario.step()
    info = scenario.scheduler.explain("s")
    assert info.waits_for is WaitReason.ENCODER
    assert "3 tokens" in info.why and "0 of 8" in info.why
    while scenario.requests[1].num_computed_tokens < 5:
        scenario.step()


def test_a_running_request_that_waits_for_its_next_image_says_why():
    scenario = Scenario(encoder_budget=6, cache=6, budget=20, max_chunk_size=7)
    scenario.add(with_images(make_request("r", 30), image(5, 6, b"a")))
    scenario.add(with_images(make_request("s", 12), image(7, 5, b"b")))
    assert counts(scenario.step()) == {"r": 7, "s": 7}
    assert counts(scenario.step()) == {"r": 7}
    info = scenario.scheduler.explain("s")
    assert (info.status, info.waits_for) == ("running", WaitReason.ENCODER)
    plan = scenario.step()
    assert counts(plan)["s"] == 5
    assert scenario.scheduler.explain("s").waits_for is None


def test_a_cached_prefix_that_covers_an_image_needs_no_encoder():
    scenario = Scenario(encoder_budget=8, cache=8)
    prompt = list(range(20))
    scenario.add(with_images(make_request("r", prompt), image(2, 8, b"a")))
    scenario.step()
    scenario.add(with_images(make_request("x", 10), image(0, 8, b"b")))
    scenario.step()
    assert scenario.kept.rows.keys() == {b"b"}
    scenario.add(with_images(make_request("s", prompt), image(2, 8, b"a")))
    plan = scenario.step()
    assert plan.scheduled_encoder_inputs == {}
    assert counts(plan)["s"] == 4


def test_an_image_that_is_computed_whole_is_never_cut():
    scenario = Scenario(budget=10, disable_chunked_mm_input=True)
    scenario.add(with_images(make_request("r", 20), image(4, 8)))
    assert [counts(scenario.step())["r"] for _ in range(3)] == [4, 10, 6]


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"encoder_budget": 7}, "--max-num-encoder-input-tokens"),
        ({"cache": 7}, "--encoder-cache-size"),
        ({"budget": 7, "disable_chunked_mm_input": True}, "--max-num-batched-tokens"),
    ],
)
def test_an_image_that_can_never_be_encoded_is_refused_on_arrival(settings, option):
    scenario = Scenario(**settings)
    with pytest.raises(ValueError, match=rf"8 .* 7.*{option}"):
        scenario.add(with_images(make_request("r", 20), image(4, 8)))
    assert not scenario.scheduler.has_work()


def test_a_failed_step_leaves_no_output_that_was_never_made():
    scenario = Scenario()
    scenario.add(with_images(make_request("r", 10), image(1, 8)))
    plan = scenario.scheduler.schedule()
    assert plan.scheduled_encoder_inputs == {"r": [0]}
    scenario.scheduler.discard_step(plan, "it failed")
    scenario.scheduler.update_from_output(plan, ModelRunnerOutput(req_ids=[], sampled_token_ids=[]))
    plan = scenario.step()
    assert plan.free_encoder_mm_hashes == [b"a"]
    assert plan.scheduled_encoder_inputs == {"r": [0]}


def test_an_aborted_request_holds_nothing():
    scenario = Scenario(budget=4)
    scenario.add(with_images(make_request("r", 10), image(1, 8, b"a")))
    scenario.step()
    scenario.scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    scenario.add(with_images(make_request("s", 10), image(1, 8, b"b")))
    assert scenario.step().scheduled_encoder_inputs == {"s": [0]}


# ---------------------------------------------------------------------- random lives


class EncoderMachine(SchedulerMachine):
    """The random lives of `SchedulerMachine`, with images in the prompts and a device that keeps
    their outputs by the plans: what runs has its images, and nothing is kept beyond the bound."""

    def _draw_more(self, draw):
        budget, capacity = draw.randint(4, 10), draw.randint(4, 14)
        is_whole = draw.random() < 0.3
        self.outputs = Outputs(budget, capacity)
        self.most_rows = min(budget, capacity)
        self.config = dataclasses.replace(
            self.config,
            max_num_encoder_input_tokens=budget,
            encoder_cache_size=capacity,
            disable_chunked_mm_input=is_whole,
            max_num_shared_tokens=None if is_whole else self.config.max_num_shared_tokens,
        )

    def _draw_features(self, draw, request):
        most = self.most_rows
        if self.config.disable_chunked_mm_input:
            most = min(most, self.config.max_chunk // request.num_sequences)
        images, start = [], draw.randint(0, 4)
        while most and start < request.num_prompt_tokens and draw.random() < 0.8:
            count = min(draw.randint(1, most), request.num_prompt_tokens - start)
            images.append(image(start, count, bytes([count, draw.randint(0, 2)])))
            start += count + draw.randint(0, 3)
        request.content = PromptContent(features=images)

    def _launch(self, **failure):
        plan = super()._launch(**failure)
        has_failed = self.device._steps[-1][1] is None
        self.outputs.follow(plan, self._features_of, has_failed=has_failed)
        if self.config.disable_chunked_mm_input:
            self._check_whole(plan)
        return plan

    def _features_of(self, name):
        name = name.split("#")[0]
        return self.requests[name].content.features if name in self.requests else ()

    def _check_whole(self, plan):
        batch = plan.batch
        for name, first, count in zip(
            batch.req_ids, batch.num_computed_tokens, batch.num_scheduled_tokens, strict=True
        ):
            for each in self._features_of(name):
                assert not each.start < first + count < each.stop, "an image is cut"


class EncoderMachineAhead(EncoderMachine):
    depth = 2


TestEncoderMachine = EncoderMachine.TestCase
TestEncoderMachineAhead = EncoderMachineAhead.TestCase
TestEncoderMachine.settings = TestEncoderMachineAhead.settings = settings(
    max_examples=examples(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
