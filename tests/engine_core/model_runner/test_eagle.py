"""EAGLE-3 heads in the CPU runner: drafts are those of the published formula, and no token changes.

Proves S032, S101, S215, S220, S226: these drafts are verified as all are."""

import numpy as np
import pytest
import torch
from drafted_loop import MOST, VOCAB, DraftedLoop, answers_of_all, finish_greedy
from eagle_runners import TARGETS, WIDTH, eagle_reference, eagle_runner
from engine_loop import few_blocks
from runners import load_reference

from protocol.sampling import SamplingParams
from tests.eagle_heads import PublishedHead, head_tensors


@pytest.fixture(scope="module", params=TARGETS)
def reference(request):
    return eagle_reference(request.param)


@pytest.fixture
def make(reference, ops):
    """(config of a head or None, its tensors, options) -> a runner."""
    model = load_reference(reference, ops)
    return lambda config, tensors=None, **options: eagle_runner(
        model, ops, config, tensors or reference.head_tensors, max_num_drafts=8 * MOST, **options
    )


def states_of(reference, token_ids):
    """Of all tokens but the last, for each layer that the tiny heads read."""
    layers = (0, 1, 2) if reference.config.num_hidden_layers == 3 else (2, 3, 4)
    kept = {}
    hooks = [reference.model.norm.register_forward_pre_hook(lambda _, x: kept.update({4: x[0][0]}))]
    with torch.no_grad():
        out = reference(torch.tensor([token_ids[:-1]]), output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    return [kept[4] if layer == 4 else out.hidden_states[layer][0] for layer in layers]


@pytest.mark.parametrize("memory", ["enough", "recompute", "swap"])
def test_drafts_are_those_of_the_published_formula(make, reference, monkeypatch, memory):
    """Behind chunks, verified and rejected drafts, preemption and swaps; greedy. In an order of the
    rows that is not the plan's, as adapters have it."""
    options = {} if memory == "enough" else few_blocks(reference)
    runner = make(reference.head, **options)
    monkeypatch.setattr(runner.parts, "order", lambda rows: np.arange(len(rows))[::-1])
    loop = DraftedLoop(runner, monkeypatch, wanted=None, swap=memory == "swap")
    finish_greedy(loop)
    statistics = loop.scheduler.statistics()
    assert (memory != "enough") == (statistics.num_preemptions > 0)
    published = PublishedHead(
        reference.head, reference.head_tensors, reference.get_input_embeddings().weight.detach()
    )
    assert len(loop.drafts) > 60
    for _, tokens, drafts in loop.drafts[::3]:
        assert drafts == published.drafts(tokens, states_of(reference, tokens), len(drafts))
    assert len({token for _, _, drafts in loop.drafts for token in drafts}) > 20


@pytest.mark.parametrize("memory", ["enough", "recompute", "swap"])
def test_no_token_depends_on_the_head(make, reference, monkeypatch, memory):
    """Parameters of all kinds, samples, beams, an abort, prefixes that are found, and blocks so few
    that requests give way."""
    options = {} if memory == "enough" else few_blocks(reference)
    answers = []
    for head in (None, reference.head):
        loop = DraftedLoop(
            make(head, **options),
            monkeypatch,
            wanted=None,
            swap=memory == "swap",
            drafted=head is not None,
        )
        answers.append(answers_of_all(loop))
    assert answers[0] == answers[1]
    assert loop.scheduler.statistics().num_draft_tokens > 20


def test_a_found_prefix_has_the_heads_keys_too(make, reference, monkeypatch):
    """The second request computes its last tokens only, and its drafts are as if it had computed
    all of them: both go on with the same token behind the prefix."""
    loop = DraftedLoop(make(reference.head), monkeypatch)
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    prompt = list(range(10, 51))
    loop.add("a", prompt, params)
    loop.finish()
    loop.add("b", prompt, params)
    loop.finish()
    assert loop.num_cached_tokens["b"] == 40
    drafts = {name: [each[1:] for each in loop.drafts if each[0] == name] for name in "ab"}
    assert len(drafts["a"]) > 2
    assert drafts["a"] == drafts["b"]


def train(reference, config, texts, *, num_steps):
    """Tensors of a head that has read these texts, all of one length, by the published formula."""
    tensors = head_tensors(config)
    for tensor in tensors.values():
        tensor.requires_grad_()
    head = PublishedHead(config, tensors, reference.get_input_embeddings().weight.detach())
    tokens = torch.tensor(texts)
    each = [states_of(reference, text) for text in texts]
    states = [torch.stack(layer) for layer in zip(*each, strict=True)]
    optimiser = torch.optim.Adam(tensors.values(), 0.01)
    for _ in range(num_steps):
        logits, _ = torch.vmap(head)(tokens[:, 1:], head.combine(states))
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 2:].flatten()
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {name: tensor.detach() for name, tensor in tensors.items()}


@pytest.mark.parametrize("ops", ["native"], indirect=True)
def test_a_head_that_has_learnt_its_target_is_mostly_right(make, reference, monkeypatch):
    """Trained for a moment on the target's own texts and states. Chance is one in 131; with the
    states of the layers exchanged it is wrong again."""
    config = reference.head | {"draft_vocab_size": VOCAB}
    prompts = [[11 + number, 12, 13 + number] for number in range(12)]

    def served(tensors):
        loop = DraftedLoop(make(config, tensors), monkeypatch, wanted=1)
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
            loop.add(f"r{number}", prompt, params)
        loop.finish()
        return loop.tokens, loop.num_accepted / loop.num_drafted

    tokens, untrained_rate = served(head_tensors(config))
    texts = [prompt + tokens[f"r{number}", 0] for number, prompt in enumerate(prompts)]
    trained = train(reference, config, texts, num_steps=60)
    again, rate = served(trained)
    fc = trained["fc.weight"]
    exchanged, wrong_rate = served(trained | {"fc.weight": fc.roll(WIDTH, 1)})
    assert tokens == again == exchanged
    assert rate > 0.9
    assert wrong_rate < 0.7
    assert untrained_rate < 0.2
