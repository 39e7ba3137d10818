"""The synchronous face: batches over an address, order, refusals, interrupts, the progress bar."""

import signal
import struct
import threading

import pytest
from fake_engine import wait_until
from fake_model import EOS_ID, expected_text, ids_of

from frontend import LLM, BeamSearchParams, EngineDied, InvalidInput, SamplingParams
from frontend.errors import ClientClosed
from protocol.outputs import Logprobs


class Bar:
    def __init__(self, **options):
        self.options = options
        self.num_done = 0
        self.closed = False

    def update(self, n):
        self.num_done += n

    def close(self):
        self.closed = True


@pytest.fixture
def llm(engine):
    with LLM(address=engine.address) as llm:
        yield llm


def made_up_logprobs(token_id, num_top):
    return Logprobs(
        num_positions=1,
        width=1,
        token_ids=struct.pack("<i", token_id),
        logprobs=struct.pack("<f", -(token_id**0.5)),
        ranks=[1],
    )


def params(**more):
    return SamplingParams(**{"temperature": 0, "max_tokens": 5, **more})


def test_outputs_come_in_the_prompts_order_whatever_ends_first(llm):
    """Proves S189, S190, S193."""
    lengths = [30, 2, 17, 1]
    prompts = ["one", ids_of("two"), {"prompt": "three"}, {"prompt_token_ids": ids_of("four")}]
    outputs = llm.generate(prompts, [params(max_tokens=n) for n in lengths], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert [output.prompt for output in outputs] == ["one", None, "three", None]
    assert [output.prompt_token_ids for output in outputs] == [
        ids_of(text) for text in ("one", "two", "three", "four")
    ]
    assert all(output.finished for output in outputs)
    texts = [output.outputs[0].text for output in outputs]
    assert texts == [
        expected_text(text, n)
        for text, n in zip(("one", "two", "three", "four"), lengths, strict=True)
    ]


def test_the_best_of_several_samples_are_those_with_the_largest_sums(llm, engine, monkeypatch):
    """Of the same samples that n gives."""
    monkeypatch.setattr("fake_engine.logprobs", made_up_logprobs)
    fields = {"temperature": 1, "seed": 3, "max_tokens": 7}
    asked = [
        params(n=5, logprobs=0, **fields),
        params(n=2, best_of=5, **fields),
        params(n=5, best_of=5, logprobs=0, **fields),
    ]
    every, best, same = llm.generate(["one"] * 3, asked, use_tqdm=False)
    ranked = sorted(every.outputs, key=lambda each: -each.cumulative_logprob)
    assert len({each.cumulative_logprob for each in ranked}) == 5
    assert [each.token_ids for each in best.outputs] == [each.token_ids for each in ranked[:2]]
    assert [each.index for each in best.outputs] == [0, 1]
    assert [each.token_ids for each in same.outputs] == [each.token_ids for each in every.outputs]
    assert [each.num_sequences for each in engine.requests] == [5, 5, 5]


@pytest.mark.parametrize("prompt", ["one", ids_of("one"), {"prompt": "one"}])
def test_a_single_prompt_gives_a_list_of_one(llm, prompt):
    [output] = llm.generate(prompt, params(), use_tqdm=False)
    assert output.prompt_token_ids == ids_of("one")


def test_token_lists_are_prompts_of_their_own(llm):
    """Proves S193."""
    outputs = llm.generate([[1, 2], [3]], params(), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[1, 2], [3]]


def test_the_progress_bar_counts_prompts(llm):
    bars = []

    def make(**options):
        bars.append(Bar(**options))
        return bars[-1]

    llm.generate(["a", "b", "c"], params(n=1), use_tqdm=make)
    [bar] = bars
    assert (bar.options["total"], bar.num_done, bar.closed) == (3, 3, True)


def test_a_bar_is_shown_by_default(llm, capsys):
    llm.generate(["a", "b"], params())
    assert "Processed prompts: 100%" in capsys.readouterr().err


def test_one_bad_prompt_is_named_and_nothing_is_sent(llm, engine):
    with pytest.raises(InvalidInput, match="prompt 1 holds token id 257"):
        llm.generate(["good", [EOS_ID + 1]], params())
    llm.statistics()
    assert engine.requests == []


def test_a_refusal_ends_only_its_own_request_and_a_line_says_how_many(start_engine, caplog):
    bad = ids_of("bad")
    engine = start_engine(refuse=lambda r: "not today" if r.prompt_token_ids == bad else None)
    with LLM(address=engine.address) as llm:
        outputs = llm.generate(["good", "bad", "bad"], params(), use_tqdm=False)
        assert llm.generate([], params()) == []
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", "error", "error"]
    assert outputs[1].finished
    assert outputs[1].outputs[0].detail == "not today"
    warnings = [r.getMessage() for r in caplog.records if "finish_reason" in r.getMessage()]
    assert warnings == ["2 of 3 completions ended with finish_reason 'error'; the first: not today"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"n": 65, "temperature": 1}, "n is 65, it must be from 1 to max_num_seqs 64.*larger"),
        ({"best_of": 65, "temperature": 1}, "best_of is 65, it must be from 1 to max_num_seqs 64"),
        (
            {"stop_token_ids": [257]},
            "stop_token_ids holds token id 257, the vocabulary ends at 256",
        ),
        ({"logit_bias": {999: 1.0}}, "logit_bias holds token id 999"),
        ({"allowed_token_ids": [5, 300]}, "allowed_token_ids holds token id 300"),
        ({"logprobs": 21}, "logprobs is 21, the limit is 20"),
        ({"logprobs": -1}, "logprobs is -1, the limit is 20"),
    ],
)
def test_what_the_engine_would_refuse_raises_before_anything_is_sent(llm, engine, more, message):
    with pytest.raises(InvalidInput, match=message):
        llm.generate(["good", "bad"], [params(), params(**more)], use_tqdm=False)
    llm.statistics()
    assert engine.requests == []


def test_beams_beyond_the_engines_limit_raise_before_anything_is_sent(start_engine):
    engine = start_engine(max_num_seqs=3)
    with LLM(address=engine.address) as llm:
        with pytest.raises(InvalidInput, match="beam_width is 4, it must be from 1 to max_num_seq"):
            llm.beam_search("x", BeamSearchParams(beam_width=4))
        llm.statistics()
    assert engine.requests == []


def test_a_model_for_text_alone_refuses_to_pool_and_says_how_to_start_it(llm):
    for call in (llm.embed, llm.classify, llm.encode, llm.reward):
        with pytest.raises(InvalidInput, match=r"this engine's tasks are generate; .*--convert"):
            call("a", use_tqdm=False)
    with pytest.raises(InvalidInput, match="the task is embed"):
        llm.score("a", "b", use_tqdm=False)


def test_a_lost_engine_raises(start_engine):
    engine = start_engine(die_after_tokens=10)
    with LLM(address=engine.address, reconnect_timeout_s=0.2) as llm, pytest.raises(EngineDied):
        llm.generate(["x"], params(max_tokens=300), use_tqdm=False)


def test_parameters_must_be_as_many_as_prompts(llm):
    with pytest.raises(InvalidInput, match="2 prompts and 1 sampling_params"):
        llm.generate(["a", "b"], [params()])


def test_the_callers_parameters_are_left_as_they_are(llm):
    mine = params()
    llm.generate("x", mine, use_tqdm=False)
    assert mine == params()


def test_an_interrupt_aborts_every_request(llm, engine):
    def interrupt():
        wait_until(lambda: engine.num_live == 3)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], params(max_tokens=500), use_tqdm=False)
    thread.join()
    llm.statistics()
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)


def test_chat_takes_one_conversation_or_several(llm):
    one = [{"role": "user", "content": "hi"}]
    [output] = llm.chat(one, params(), use_tqdm=False)
    assert output.prompt == "user:hi;"
    outputs = llm.chat([one, [{"role": "user", "content": "yo"}]], params(), use_tqdm=False)
    assert [output.prompt for output in outputs] == ["user:hi;", "user:yo;"]


def test_what_is_not_supported_is_refused_by_name(llm):
    with pytest.raises(InvalidInput, match="lora_request"):
        llm.generate("x", params(), lora_request=object())
    with pytest.raises(InvalidInput, match="chat_template_content_format"):
        llm.chat([{"role": "user", "content": "x"}], chat_template_content_format="openai")


def test_engine_options_without_a_model_are_refused():
    with pytest.raises(InvalidInput, match="max_num_seqs"):
        LLM(address="ipc:///nowhere", max_num_seqs=4)
    with pytest.raises(InvalidInput, match="give one of them"):
        LLM("model", address="ipc:///nowhere")


def test_a_closed_llm_says_so(engine):
    llm = LLM(address=engine.address)
    llm.close()
    llm.close()
    with pytest.raises(ClientClosed):
        llm.generate("x")
    wait_until(lambda: engine.num_goodbyes == 1)


def test_defaults_and_tokenizer_are_the_models(llm):
    defaults = llm.get_default_sampling_params()
    defaults.max_tokens = 3
    assert (defaults.temperature, defaults.top_k) == (0.25, 7)
    [output] = llm.generate("x", defaults, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    assert llm.get_tokenizer().decode(ids_of("abc")) == "abc"
    assert llm.reset_prefix_cache()


@pytest.mark.parametrize("wanted", [0, 2])
def test_prompt_logprobs_have_one_entry_a_token_and_none_for_the_first(llm, wanted):
    output, alone = llm.generate(["one", "x"], params(prompt_logprobs=wanted), use_tqdm=False)
    found = output.prompt_logprobs
    assert (len(found), found[0]) == (3, None)
    num_others = {0: 0, 2: 1}[wanted]  # one of the likeliest is the token itself
    for place, (token_id, entry) in enumerate(zip(ids_of("one")[1:], found[1:], strict=True), 1):
        assert next(iter(entry)) == token_id
        assert (entry[token_id].logprob, entry[token_id].rank) == (-place, place)
        assert len(entry) == 1 + num_others
    assert found == list(found)
    assert found[-1] == list(found)[-1]
    assert alone.prompt_logprobs == [None]


def test_more_prompt_logprobs_than_an_answer_may_have_are_refused(llm, monkeypatch):
    monkeypatch.setattr("protocol.requests.MAX_PROMPT_LOGPROBS", 40)
    with pytest.raises(InvalidInput, match=r"is 20, which is 42 numbers .* is 40; ask for fewer"):
        llm.generate("one", params(prompt_logprobs=20), use_tqdm=False)
