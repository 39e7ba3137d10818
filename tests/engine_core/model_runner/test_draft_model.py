"""A draft model in the CPU runner: no token changes, and the same model is always right."""

import pytest
import torch
import transformers
from drafted_loop import MOST, VOCAB, DraftedLoop, add_all, answers_of_all
from engine_loop import EngineLoop, few_blocks, make_scheduler
from runners import load_reference, runner_config, spoiled

from engine_core.model_runner.config import DraftConfig
from engine_core.model_runner.cpu.draft_model import DraftModel
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.startup.draft_model import first_layers_config
from protocol.sampling import SamplingParams


@pytest.fixture
def make(reference, ops):
    """(draft model's name or None, options) -> a runner; "same", "first" of its layers, "other"."""
    model = load_reference(reference, ops)

    def make_runner(name, **options):
        drafts = {"same": lambda: model, "first": lambda: model.first_layers(1), "other": other}
        draft = None if name is None else DraftConfig(drafts[name](), ops)
        config = runner_config(model, ops, draft=draft, max_num_drafts=8 * MOST, **options)
        return spoiled(CPUModelRunner(config))

    def other():
        torch.manual_seed(5)
        return load_reference(type(reference)(reference.config), ops)

    return make_runner


@pytest.mark.parametrize(
    ("name", "memory"), [("first", "enough"), ("other", "recompute"), ("first", "swap")]
)
def test_no_token_depends_on_the_draft_model(make, reference, monkeypatch, name, memory):
    """Parameters of all kinds, samples, beams, an abort, and blocks so few that requests give
    way."""
    options = {} if memory == "enough" else few_blocks(reference)
    answers = []
    for draft in (None, name):
        loop = DraftedLoop(
            make(draft, **options),
            monkeypatch,
            wanted=None,
            swap=memory == "swap",
            drafted=draft is not None,
        )
        answers.append(answers_of_all(loop))
    assert answers[0] == answers[1]
    assert loop.scheduler.statistics().num_draft_tokens > 20


@pytest.mark.parametrize(
    ("memory", "wanted"), [("recompute", MOST), ("swap", MOST), ("enough", None), ("swap", None)]
)
def test_drafts_of_the_same_model_are_all_accepted(make, reference, monkeypatch, memory, wanted):
    """Greedy or not: both models sample with the same noise. Also where blocks were found, copied,
    swapped or given to others, and where a sequence had no drafts for some steps."""
    if wanted is None and getattr(reference.config, "sliding_window", None) is not None:
        pytest.skip("what fell out of a window meanwhile is not computed again")
    options = {} if memory == "enough" else few_blocks(reference)
    loop = DraftedLoop(make("same", **options), monkeypatch, wanted=wanted, swap=memory == "swap")
    add_all(loop, 3)
    loop.finish()
    assert loop.num_accepted == loop.num_drafted > 30


def test_prompts_are_computed_once_in_both_models(make, monkeypatch):
    """In the same chunks; and a prompt that was there before in neither."""
    runner = make("same")
    computed = []
    drafter = next(part for part in runner.parts if isinstance(part, DraftModel))
    forward = drafter.model.forward

    class Watched:
        spec = runner.config.model.spec
        compute_logits = runner.config.model.compute_logits

        def forward(self, token_ids, positions, context):
            computed.append(len(token_ids))
            return forward(token_ids, positions, context)

    drafter.model = Watched()
    loop = DraftedLoop(runner, monkeypatch)
    prompt = list(range(10, 51))
    loop.add("a", prompt, SamplingParams(max_tokens=1, temperature=0.0))
    loop.finish()
    assert computed == [32, 9]
    loop.add("b", prompt, SamplingParams(max_tokens=12, temperature=1.0, seed=3))
    loop.finish()
    # 10 blocks of 4 were found; left are a token and the two that the model has sampled
    assert computed[2:5] == [3, 1, 1]
    assert max(computed[5:]) <= 2
    assert loop.scheduler.statistics().num_accepted_tokens == (
        loop.scheduler.statistics().num_draft_tokens
    )


def test_blocks_that_the_draft_model_did_not_compute_are_known(make, monkeypatch):
    """A request that had no drafts leaves blocks of its output; another one goes on from them."""
    runner = make("same")
    without = DraftedLoop(runner, monkeypatch, wanted=0)
    without.add("a", [9, 10, 11], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    without.finish()
    prompt = [9, 10, 11, *without.tokens["a", 0]]
    with_drafts = DraftedLoop(runner, monkeypatch)
    with_drafts.scheduler = without.scheduler
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=2, ignore_eos=True)
    with_drafts.add("b", prompt, params)
    with_drafts.finish()
    statistics = with_drafts.scheduler.statistics()
    assert statistics.num_cached_prompt_tokens >= 20
    assert statistics.num_accepted_tokens == statistics.num_draft_tokens > 8


def test_the_first_layers_are_a_model_of_their_own(reference, ops):
    """Logits are those of a model that was made with so many layers."""
    model = load_reference(reference, ops)
    config = type(reference.config)(**first_layers_config(reference.config.to_dict(), 1))
    short = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    short.load_state_dict(reference.state_dict(), strict=False)
    prompt = list(range(9, 20))
    expected = short.eval()(torch.tensor([prompt])).logits[0].argmax(-1)[-1]
    runner = CPUModelRunner(runner_config(model.first_layers(1), ops))
    loop = EngineLoop(
        make_scheduler(
            runner.config.layout,
            num_blocks=100,
            num_host_blocks=0,
            swap=False,
            max_num_batched_tokens=32,
            max_num_seqs=8,
            max_model_len=64,
        ),
        runner,
        depth=1,
    )
    loop.add("a", prompt, SamplingParams(max_tokens=1, temperature=0.0))
    loop.finish()
    assert loop.tokens["a", 0] == [int(expected)]
    with pytest.raises(ValueError, match="99 of"):
        model.first_layers(99)


def test_two_shapes_share_blocks(reference, ops):
    """The draft model's layers lie behind those of the model's that look back as far."""
    model = load_reference(reference, ops)
    torch.manual_seed(1)
    small = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
    )
    draft = load_reference(transformers.AutoModelForCausalLM.from_config(small), ops)
    alone = runner_config(model, ops)
    both = runner_config(model, ops, draft=DraftConfig(draft, ops))
    more = 2 * 2 * alone.block_size * 32 * 4
    if len(alone.layout.groups) == 1:
        assert both.layout.block_bytes == alone.layout.block_bytes + more
    places = {(both.layout.group_of(layer), at) for layer, at in both.layout.offsets.items()}
    assert len(places) == model.spec.num_layers + 2
