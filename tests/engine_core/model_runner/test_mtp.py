"""Heads for multi-token prediction in the CPU runner, beside layers that keep states: drafts are
those of the published formula, and no token changes.

Proves S032, S101, S215, S220, S226: these drafts are verified as all are."""

import pytest
import torch
from drafted_loop import MOST, DraftedLoop, answers_of_all, finish_greedy
from runners import load_reference, runner_config, spoiled

from engine_core.model_runner.config import DraftConfig
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.models.loading import load_mtp_head
from protocol.sampling import SamplingParams
from tests.engine_core.models import latent_cases, qwen_hybrid_cases
from tests.engine_core.models.decoder_cases import random_model
from tests.engine_core.models.qwen_hybrid_cases import CONFIGS, spread_out
from tests.mtp_heads import PublishedMTP

DENSE, EXPERTS, LATENTS = "qwen3.5", "qwen3.5 with experts", "deepseek-v3, YaRN"
CHOSEN = "deepseek-v3.2, YaRN"


def reference_model(name):
    return (qwen_hybrid_cases if name in CONFIGS else latent_cases).reference_model(name)


@pytest.fixture
def make(ops):
    """(reference, its head or None, blocks of each pool) -> a runner."""

    def make(reference, published, num_blocks=150):
        model, draft = load_reference(reference, ops), None
        if published is not None:
            config, tensors = reference.config.to_dict(), published.tensors
            head = load_mtp_head(config, tensors.items(), model, dtype=torch.float32, ops=ops)
            draft = DraftConfig(head, ops)
        options = {"draft": draft, "max_num_drafts": 8 * MOST}
        layout = runner_config(model, ops, **options).layout
        sizes = layout.sizes(num_blocks)
        host_sizes = tuple(2 * size for size in sizes)
        options |= {"num_blocks": sizes, "num_host_blocks": host_sizes}
        return spoiled(CPUModelRunner(runner_config(model, ops, **options)))

    return make


@pytest.mark.parametrize("memory", ["enough", "recompute", "swap"])
@pytest.mark.parametrize(("name", "chunk"), [(DENSE, 7), (EXPERTS, 32), (CHOSEN, 19)])
@pytest.mark.parametrize("ops", ["native"], indirect=True)
def test_drafts_are_those_of_the_published_formula(make, monkeypatch, name, chunk, memory):
    """Behind chunks, verified and rejected drafts, preemption and swaps; greedy."""
    published = PublishedMTP(reference := reference_model(name))
    runner = make(reference, published, 150 if memory == "enough" else 28)
    loop = DraftedLoop(runner, monkeypatch, wanted=None, swap=memory == "swap", chunk=chunk)
    finish_greedy(loop)
    assert (memory != "enough") == (loop.scheduler.statistics().num_preemptions > 0)
    assert len(loop.drafts) > 60
    for _, tokens, drafts in loop.drafts[::3]:
        assert drafts == published.drafts(tokens, len(drafts))
    assert len({token for _, _, drafts in loop.drafts for token in drafts}) > 20


@pytest.mark.parametrize(
    ("name", "memory", "chunk", "ops"),
    [
        (DENSE, "enough", 32, "torch"),
        (DENSE, "recompute", 7, "native"),
        (DENSE, "swap", 19, "native"),
        (EXPERTS, "recompute", 13, "native"),
        (LATENTS, "swap", 7, "native"),
        (CHOSEN, "recompute", 7, "native"),
    ],
    indirect=["ops"],
)
def test_no_token_depends_on_the_head(make, monkeypatch, name, memory, chunk):
    """Parameters of all kinds, samples, beams, an abort, prefixes that are found, chunks, and
    blocks so few that requests give way."""
    reference, answers = reference_model(name), []
    for published in (None, PublishedMTP(reference)):
        loop = DraftedLoop(
            make(reference, published, 150 if memory == "enough" else 56),  # three beams fit
            monkeypatch,
            wanted=None,
            swap=memory == "swap",
            drafted=published is not None,
            chunk=32 if published is None else chunk,
        )
        answers.append(answers_of_all(loop))
    assert answers[0] == answers[1]
    assert loop.scheduler.statistics().num_draft_tokens > chunk


@pytest.mark.parametrize("ops", ["native"], indirect=True)
def test_a_head_that_has_learnt_its_target_is_mostly_right(make, monkeypatch):
    """Trained for a moment on the target's own texts and states. Chance is one in 131; with the
    halves of `fc` exchanged it is wrong again."""
    reference = spread_out(random_model(CONFIGS[DENSE]))  # of tensors that are trained through
    prompts = [[11 + number, 12, 13 + number] for number in range(12)]

    def served(published):
        loop = DraftedLoop(make(reference, published), monkeypatch, wanted=1)
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
            loop.add(f"r{number}", prompt, params)
        loop.finish()
        return loop.tokens, loop.num_accepted / loop.num_drafted

    published = PublishedMTP(reference)
    tokens, untrained_rate = served(published)
    texts = [prompt + tokens[f"r{number}", 0] for number, prompt in enumerate(prompts)]
    with torch.no_grad():
        hidden = reference.model(torch.tensor(texts), use_cache=False).last_hidden_state
    optimiser = torch.optim.Adam(published.parameters(), 0.01)
    tokens_BT = torch.tensor(texts)
    for _ in range(40):
        logits, _ = published(tokens_BT[:, 1:], hidden[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens_BT[:, 2:].flatten()
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    again, rate = served(published)
    half = reference.config.hidden_size
    published.fc.weight.data = published.fc.weight.data.roll(half, 1)
    exchanged, wrong_rate = served(published)
    assert tokens == again == exchanged
    assert rate > 0.9
    assert wrong_rate < 0.7
    assert untrained_rate < 0.2
