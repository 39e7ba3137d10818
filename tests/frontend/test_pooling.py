"""Calls for vectors, classes and scores: what is sent, what comes back, what is refused. The
scripted engine's vector of a prompt is its length, first and last token, and 0.5."""

import asyncio
import math

import pytest
from fake_model import byte_tokenizer

from frontend import InvalidInput, PoolingParams, RequestFailed, RequestRejected
from frontend.async_llm import AsyncLLM
from frontend.text.tokenizer import Tokenizer
from protocol.outputs import TokenizerInfo
from protocol.pooling import POOLING_SAMPLING, PoolingTask

VECTORS = {"tasks": ("embed", "token_embed")}
PROMPTS = {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "query"}
LABELS = {"tasks": ("classify", "token_classify", "score")}


def ids_of(text):
    return byte_tokenizer().encode(text).ids


A, B, C = ids_of("a")[0], ids_of("b")[0], ids_of("c")[0]


@pytest.fixture
async def connect(start_engine):
    """(fields of the model) -> a client, and its engine."""
    clients = []

    async def start(fields, **script):
        engine = start_engine(model_fields=fields, **script)
        clients.append(await AsyncLLM.connect(engine.address, reconnect_timeout_s=3))
        return clients[-1], engine

    yield start
    for client in clients:
        await client.close()


async def test_vectors_come_in_the_order_of_texts_and_token_ids(connect):
    llm, engine = await connect(VECTORS)
    found = await llm.embed(["ab", [7, 8, 9], {"prompt": "c", "cache_salt": "s"}])
    assert [each.outputs.embedding for each in found] == [
        [2, A, B, 0.5], [3, 7, 9, 0.5], [1, C, C, 0.5],
    ]  # fmt: skip
    assert [each.prompt_token_ids for each in found] == [[A, B], [7, 8, 9], [C]]
    assert found[0].outputs.hidden_size == 4
    assert [each.num_cached_tokens for each in found] == [1, 1, 1]
    sent = engine.requests[0]
    assert sent.sampling_params == POOLING_SAMPLING
    assert (sent.pooling_params.task, sent.pooling_params.dimensions) == (PoolingTask.EMBED, None)
    assert engine.requests[2].cache_salt == "s"
    one = await llm.embed("ab", PoolingParams(dimensions=2, use_activation=False), priority=3)
    assert len(one) == 1
    params = engine.requests[-1].pooling_params
    assert (params.dimensions, params.use_activation, engine.requests[-1].priority) == (2, False, 3)


async def test_rows_of_tokens_and_other_tasks(connect):
    llm, _ = await connect(VECTORS)
    (tokens,) = await llm.encode("ab", pooling_task="token_embed")
    assert tokens.outputs.data == [[A, 1], [B, 1]]
    (vector,) = await llm.encode("ab", PoolingParams(task="embed"))
    assert vector.outputs.data == [2, A, B, 0.5]
    with pytest.raises(InvalidInput, match="the task is 'x', there is embed"):
        await llm.encode("ab", pooling_task="x")
    with pytest.raises(InvalidInput, match="the task is classify, this engine's tasks are embed"):
        await llm.classify("ab")
    with pytest.raises(InvalidInput, match="the task is generate, this engine's tasks are embed"):
        async for _ in llm.generate("ab"):
            pass


async def test_labels_and_rewards(connect):
    llm, _ = await connect(LABELS)
    (classes,) = await llm.classify("ab")
    assert (classes.outputs.probs, classes.outputs.num_classes) == ([0.25, 0.75], 2)
    (reward,) = await llm.reward("ab")
    assert reward.outputs.data == [[A, 1], [B, 1]]


async def test_a_models_prompts_go_before_texts_and_not_before_token_ids(connect):
    llm, engine = await connect(VECTORS | PROMPTS)
    await llm.embed(["a", [1]])
    await llm.embed("a", prompt_name="document")
    assert [each.prompt_token_ids for each in engine.requests] == [ids_of("Q: a"), [1], ids_of("a")]
    with pytest.raises(InvalidInput, match="prompt_name is 'x', this model has query, document"):
        await llm.embed("a", prompt_name="x")
    with pytest.raises(InvalidInput, match="for token ids; put its tokens before them"):
        await llm.embed([1], prompt_name="query")


async def test_scores_of_vectors_are_their_cosine_and_pairs_are_one_prompt(connect):
    llm, engine = await connect(VECTORS)
    found = await llm.score(["ab"], ["ab", "xyz"])
    assert found[0].outputs.score == pytest.approx(1)
    first, second = (2, A, B, 0.5), (3, *ids_of("xz"), 0.5)
    dot = sum(a * b for a, b in zip(first, second, strict=True))
    assert found[1].outputs.score == pytest.approx(dot / math.hypot(*first) / math.hypot(*second))
    assert len(engine.requests) == 3, "the text that both share is computed once"
    assert [len(each.prompt_token_ids) for each in found] == [4, 3]
    with pytest.raises(InvalidInput, match="data_1 has 2 texts and data_2 3"):
        await llm.score(["a", "b"], ["a", "b", "c"])


async def test_a_model_with_one_label_scores_both_texts_as_one(connect):
    llm, engine = await connect(LABELS)
    found = await llm.score(["a", "b"], ["xyz", "w"])
    assert [each.outputs.score for each in found] == [4 / 64, 2 / 64]
    assert [each.prompt_token_ids for each in engine.requests] == [ids_of("axyz"), ids_of("bw")]


async def test_the_segments_of_a_pair_are_sent_where_the_model_has_them(connect, monkeypatch):
    llm, engine = await connect(LABELS | {"has_segments": True})
    encoded = lambda _self, text, pair, **_options: (ids_of(text + pair), len(text))  # noqa: E731
    monkeypatch.setattr(Tokenizer, "encode_within", encoded)
    await llm.score(["ab"], ["xyz"])
    sent = engine.requests[0]
    assert (sent.prompt_token_ids, sent.pooling_params.second_segment_start) == (ids_of("abxyz"), 2)


@pytest.mark.parametrize(
    ("kept", "side", "expected"),
    [(3, "right", "abc"), (3, "left", "def"), (-1, "right", "abcdef"), (9, "right", "abcdef")],
)
async def test_long_texts_are_cut_at_the_side_that_was_named(connect, kept, side, expected):
    llm, engine = await connect(VECTORS)
    params = PoolingParams(truncate_prompt_tokens=kept, truncation_side=side)
    await llm.embed(["abcdef", ids_of("abcdef")], params)
    assert [each.prompt_token_ids for each in engine.requests] == [ids_of(expected)] * 2


def test_cut_texts_keep_their_special_tokens_and_pairs_lose_of_the_longer():
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"[CLS]": 0, "[SEP]": 1, "[UNK]": 2} | {
        letter: 3 + at for at, letter in enumerate("abcdef")
    }
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    tokenizer = Tokenizer(backend, TokenizerInfo(fingerprint="t", tokenizer_json=None))
    assert tokenizer.encode_within("a b c d", limit=4) == ([0, 3, 4, 1], None)
    assert tokenizer.encode_within("a b c d", limit=4, side="left") == ([0, 5, 6, 1], None)
    assert tokenizer.encode_within("a b c", "d") == ([0, 3, 4, 5, 1, 6, 1], 5)
    assert tokenizer.encode_within("a b c", "d", limit=6) == ([0, 3, 4, 1, 6, 1], 4)
    assert tokenizer.encode_within("a", add_special_tokens=False) == ([3], None)


def test_parameters_outside_their_limits_are_refused():
    with pytest.raises(InvalidInput, match="truncate_prompt_tokens is 0, it must be at least 1"):
        PoolingParams(truncate_prompt_tokens=0)
    with pytest.raises(InvalidInput, match="truncation_side is 'up'"):
        PoolingParams(truncation_side="up")


async def test_each_text_may_have_parameters_of_its_own(connect):
    llm, engine = await connect(VECTORS)
    await llm.embed(["a", "b"], [PoolingParams(dimensions=2), PoolingParams(dimensions=3)])
    assert [each.pooling_params.dimensions for each in engine.requests] == [2, 3]
    for params, words in (
        ([PoolingParams()], "2 prompts and 1 pooling_params"),
        ({"dimensions": 2}, "pooling_params is of type dict"),
    ):
        with pytest.raises(InvalidInput, match=words):
            await llm.embed(["a", "b"], params)


async def test_nothing_is_sent_if_one_prompt_cannot_be_served(connect):
    llm, engine = await connect(VECTORS)
    with pytest.raises(InvalidInput, match="prompt 1 is empty"):
        await llm.embed(["a", ""])
    with pytest.raises(InvalidInput, match="dimensions is 0"):
        await llm.embed("a", PoolingParams(dimensions=0))
    assert not engine.requests


async def test_a_request_that_fails_ends_the_call_and_aborts_the_others(connect):
    refuse = lambda request: "no" if request.prompt_token_ids == [B] else None  # noqa: E731
    fail = lambda request, _number: "broken" if request.prompt_token_ids == [C] else None  # noqa: E731
    llm, engine = await connect(VECTORS, refuse=refuse, fail=fail, step_s=0.05)
    with pytest.raises(RequestRejected, match="no"):
        await llm.embed(["b", "a", "a"])
    with pytest.raises(RequestFailed, match="ended with reason error: broken"):
        await llm.embed(["c", "a"])
    assert len(llm.session.requests) == 0
    for _ in range(50):
        if not engine.num_live:
            break
        await asyncio.sleep(0.02)
    assert not engine.num_live


async def test_of_several_engines_one_that_has_the_task_is_asked(start_engine, address):
    text = start_engine(at=f"{address}-1", model_fields={"tasks": ("generate",)})
    both = start_engine(at=f"{address}-2", model_fields={"tasks": ("generate", "embed")})
    async with AsyncLLM([both.address, text.address], reconnect_timeout_s=3) as llm:
        await llm.embed(["a"] * 4)
    assert (len(text.requests), len(both.requests)) == (0, 4)
