"""Beam search through the scheduler and its cache, against transformers on a tiny random Llama."""

import pytest
from beam_reference import PROMPT, reference, tiny_llama
from scenario_help import Scenario
from tiny_runner import Rows

from engine_core.scheduler import Request
from protocol.outputs import EngineCoreOutput, FinishReason
from protocol.sampling import BeamSearchParams, SamplingParams
from tests.engine_core.new_request import new_request
from tests.protocol.all_outputs import all_outputs


def run(
    params: BeamSearchParams,
    max_tokens: int,
    eos: list[int],
    before: list[Request] | None = None,
    **settings,
) -> tuple[list[EngineCoreOutput], int]:
    """The beams' outputs, and the most blocks in use at a time. `before`: requests ahead of it."""
    request = new_request(
        request_id="beams",
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        eos_token_ids=eos,
        num_sequences=params.beam_width,
        beam_search=params,
    )
    rows = Rows()
    scenario = Scenario(*(before or ()), request, **{"block_size": 4, **settings})
    found: list[EngineCoreOutput] = []
    most_blocks = 0
    while scenario.scheduler.has_work():
        plan = scenario.plan()
        most_blocks = max(most_blocks, scenario.kv_cache.num_blocks_in_use)
        output = rows.execute(plan, params.beam_width + len(eos))
        clients = scenario.scheduler.update_from_output(plan, output, now=scenario.now)
        outputs = [each for client in clients.values() for each in all_outputs(client)]
        found += [each for each in outputs if each.request_id == "beams"]
        scenario.kv_cache.check()
    assert scenario.kv_cache.num_blocks_in_use == 0
    assert bool(request.account.num_preemptions) == bool(before)
    return found, most_blocks


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_beams_of_the_scheduler_are_those_of_transformers(width, early_stopping):
    """Without an end, and with ends that the likeliest beam meets early: then the beam goes on with
    another token than the one that was sampled for it. Proves S182."""
    params = BeamSearchParams(width, early_stopping=early_stopping)
    likely = reference(tiny_llama(), params, 12, [])[0][0]
    for eos in ([], [likely[2]], [likely[4], likely[1]]):
        tokens, scores = reference(tiny_llama(), params, 12, eos)
        found, _ = run(params, 12, eos)
        assert [output.new_token_ids for output in found] == tokens
        assert all(output.finish_reason is not None for output in found)
        assert [output.index for output in found] == list(range(width))
        ends = [output.finish_reason is FinishReason.STOP for output in found]
        assert ends == [ids[-1] in eos for ids in tokens]
        sums = [score * len(ids) for score, ids in zip(scores, tokens, strict=True)]
        assert [output.cumulative_logprob for output in found] == pytest.approx(sums, abs=1e-3)


def test_beams_share_what_they_have_in_common():
    """Fewer blocks than five separate sequences would take. Proves S182."""
    _, most_blocks = run(BeamSearchParams(5), 24, [])
    assert most_blocks < 5 * ((len(PROMPT) + 24) // 4)


@pytest.mark.parametrize(
    "settings",
    [{"preemption_mode": "recompute"}, {"preemption_mode": "swap", "num_host_blocks": 30}, {}],
)
def test_beams_that_give_way_come_back_and_end_as_they_would_have(settings):
    """Another request, ahead of them, needs their blocks. Proves S111, S182."""
    params = BeamSearchParams(3)
    eos = reference(tiny_llama(), params, 12, [])[0][0][4:5]
    before = new_request(
        request_id="before",
        prompt_token_ids=[index % 40 for index in range(30)],
        sampling_params=SamplingParams(max_tokens=25, ignore_eos=True),
    )
    found, _ = run(params, 12, eos, [before], num_blocks=15, **settings)
    assert [each.new_token_ids for each in found] == reference(tiny_llama(), params, 12, eos)[0]
