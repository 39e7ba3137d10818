"""EAGLE-3 heads in the CPU runner: drafts are those of the published formula, and no token changes.

Proves S025: with a draft model, the same blocks, steps and samplers serve EAGLE heads."""

import pytest
import torch
import transformers
from conftest import SHAPE
from drafted_loop import MOST, VOCAB, DraftedLoop
from engine_loop import few_blocks
from runners import load_reference, runner_config, spoiled

from engine_core.model_runner.config import DraftConfig
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.models.loading import load_eagle_head
from protocol.sampling import SamplingParams
from tests.eagle_heads import PublishedHead, head_config, head_tensors

TARGETS = {
    "llama": transformers.LlamaConfig(**SHAPE, num_hidden_layers=3),
    "qwen3": transformers.Qwen3Config(**SHAPE, num_hidden_layers=4, tie_word_embeddings=True),
}
HEADS = {
    "llama": {"draft_vocab_size": 90},
    "qwen3": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}},
}


@pytest.fixture(scope="module", params=TARGETS)
def reference(request):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        TARGETS[request.param], attn_implementation="eager"
    )
    model.head = head_config(model.config.to_dict(), **HEADS[request.param])
    model.head_tensors = head_tensors(model.head, own_embedding=request.param == "qwen3")
    return model.eval()


@pytest.fixture
def make(reference, ops):
    """(config and tensors of a head or None, options) -> a runner."""
    model = load_reference(reference, ops)

    def make_runner(config, tensors=None, **options):
        draft = None
        if config is not None:
            tensors = (tensors or reference.head_tensors).items()
            head = load_eagle_head(config, tensors, model, dtype=torch.float32, ops=ops)
            draft = DraftConfig(head, ops)
        config = runner_config(model, ops, draft=draft, max_num_drafts=8 * MOST, **options)
        return spoiled(CPUModelRunner(config))

    return make_runner


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
    """Behind chunks, verified and rejected drafts, preemption and swaps; greedy."""
    options = {} if memory == "enough" else few_blocks(reference)
    loop = DraftedLoop(
        make(reference.head, **options), monkeypatch, wanted=None, swap=memory == "swap"
    )
    draw = torch.Generator().manual_seed(4)
    for number in range(8):
        prompt = torch.randint(8, VOCAB, (5 * number + 1,), generator=draw).tolist()
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        loop.add(f"r{number}", prompt, params, num_sequences=1)
    loop.finish()
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
        add_all(loop, 7, beams=True)
        loop.add("gone", [9, 9, 9], SamplingParams(max_tokens=30, temperature=1.0, seed=1))
        for _ in range(4):
            loop.step()
        loop.abort("gone")
        loop.finish()
        del loop.tokens["gone", 0]
        answers.append((loop.tokens, loop.ends))
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


def test_a_head_that_learnt_its_target_is_mostly_right(make, reference, monkeypatch):
    """Trained for seconds on the target's own texts and states, by the published formula; greedy
    and sampled. The same head at other states of the target, or a random one, is mostly wrong."""
    prompts = [[11 + number, 12, 13 + number] for number in range(12)]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)

    def served(tensors, config=reference.head, temperature=0.0):
        loop = DraftedLoop(make(config, tensors), monkeypatch, wanted=1)
        for number, prompt in enumerate(prompts):
            own = SamplingParams(max_tokens=30, temperature=temperature, seed=5, ignore_eos=True)
            loop.add(f"r{number}", prompt, own)
        loop.finish()
        return loop

    plain = served(None)
    texts = [prompt + plain.tokens[f"r{number}", 0] for number, prompt in enumerate(prompts)]
    trained = train(reference, texts)
    loop = served(trained)
    assert loop.num_accepted > 0.8 * loop.num_drafted
