"""Several samples and beams of one request on a real daemon: same tokens, fewer blocks."""

import pytest
from daemons import running_daemon
from raw_client import RawClient

from frontend import LLM, BeamSearchParams, SamplingParams
from protocol.calls import Ping
from protocol.outputs import FinishReason
from protocol.requests import Abort

PROMPT = [number * 13 % 90 + 1 for number in range(75)]
"""Not a whole number of blocks: the last one is shared until it is written."""


@pytest.fixture(scope="module")
def daemon(tiny_llama):
    with running_daemon(tiny_llama, "--num-blocks", 120) as daemon:
        yield daemon


def several(client, n, **params):
    client.request("several", PROMPT, fields={"num_sequences": n}, temperature=1.0, **params)


def test_n_sequences_share_the_prompts_blocks_and_give_the_tokens_of_n_requests(daemon):
    """Proves S181, S163: prompt blocks are shared by reference, the partly filled last one is
    copied at its first write."""
    with RawClient(daemon.address) as client:
        before = client.statistics().num_finished
        several(client, 4, seed=5, max_tokens=60)
        shared = 0
        while shared == 0:
            statistics = client.statistics()
            assert statistics.num_finished == before, "it ended before it was looked at"
            shared = statistics.num_blocks_shared
        assert shared >= 3 * (len(PROMPT) // 16)
        sequences = client.collect_sequences("several")["several"]
        assert [end.index for _, end in sequences] == [0, 1, 2, 3]
        for index, (tokens, end) in enumerate(sequences):
            assert end.finish_reason is FinishReason.LENGTH
            alone, _ = client.complete(
                PROMPT, request_id=f"alone-{index}", temperature=1.0, seed=5 + index, max_tokens=60
            )
            assert tokens == alone
        assert len({tuple(tokens) for tokens, _ in sequences}) == 4
        after = client.statistics()
        assert (after.num_blocks_in_use, after.num_blocks_shared) == (0, 0)


def test_only_the_last_output_of_a_request_has_its_timings(daemon):
    with RawClient(daemon.address) as client:
        several(client, 3, seed=1, max_tokens=5)
        sequences = client.collect_sequences("several")["several"]
    assert [end.timings is not None for _, end in sequences].count(True) == 1


def test_an_abort_ends_all_sequences_and_frees_their_blocks(daemon):
    with RawClient(daemon.address) as client:
        several(client, 4, seed=1, max_tokens=170)
        client.call(Ping())
        client.send(Abort(request_ids=("several",)))
        sequences = client.collect_sequences("several")["several"]
        assert {end.finish_reason for _, end in sequences} == {FinishReason.ABORT}
        assert client.statistics().num_blocks_in_use == 0


def test_an_abort_of_one_sample_frees_its_blocks_and_the_others_go_on(daemon):
    with RawClient(daemon.address) as client:
        several(client, 3, seed=1, max_tokens=170, ignore_eos=True)
        client.call(Ping())
        client.send(Abort(request_ids=(), samples=(("several", 1), ("several", 1), ("other", 0))))
        sequences = client.collect_sequences("several")["several"]
        assert [end.finish_reason for _, end in sequences] == [
            FinishReason.LENGTH, FinishReason.ABORT, FinishReason.LENGTH,
        ]  # fmt: skip
        assert len(sequences[1][0]) < 170
        assert client.statistics().num_blocks_in_use == 0


def test_the_client_sends_one_request_and_gets_n_outputs(daemon):
    """A batch, on the daemon that serves the streams of this file. Proves S190, S204."""
    with LLM(address=daemon.address) as llm:
        params = SamplingParams(n=3, seed=9, max_tokens=12, ignore_eos=True, detokenize=False)
        [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        for index, completion in enumerate(output.outputs):
            one = SamplingParams(seed=9 + index, max_tokens=12, ignore_eos=True, detokenize=False)
            [alone] = llm.generate({"prompt_token_ids": PROMPT}, one, use_tqdm=False)
            assert completion.token_ids == alone.outputs[0].token_ids


@pytest.fixture(scope="module")
def reference(tiny_llama):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


def transformers_beams(model, prompt, params):
    """Generated tokens and scores of transformers' own beam search, best first."""
    import torch

    with torch.inference_mode():
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            do_sample=False,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=-1 if params.ignore_eos else 96,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    # of a single beam, which is a greedy answer, generate() keeps no score
    scores = [None] if params.beam_width == 1 else result.sequences_scores.tolist()
    beams = []
    for row, score in zip(result.sequences, scores, strict=True):
        tokens = row[len(prompt) :].tolist()
        if not params.ignore_eos and 96 in tokens:
            tokens = tokens[: tokens.index(96) + 1]
        beams.append((tokens, score))
    return beams


@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(beam_width=1, max_tokens=12),
        BeamSearchParams(beam_width=4, max_tokens=20),
        BeamSearchParams(beam_width=4, max_tokens=20, length_penalty=0.0),
        BeamSearchParams(beam_width=3, max_tokens=40, length_penalty=2.0),
        BeamSearchParams(beam_width=4, max_tokens=40, early_stopping=True),
        BeamSearchParams(beam_width=2, max_tokens=30, early_stopping="never"),
        BeamSearchParams(beam_width=4, max_tokens=18, ignore_eos=True),
    ],
    ids=str,
)
def test_beams_are_those_of_transformers(daemon, reference, params):
    with LLM(address=daemon.address) as llm:
        prompts = [{"prompt_token_ids": PROMPT[start : start + 20]} for start in (0, 17, 40)]
        outputs = llm.beam_search(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = transformers_beams(reference, prompt["prompt_token_ids"], params)
        assert [beam.output_token_ids for beam in output.sequences] == [
            tokens for tokens, _ in expected
        ]
        for beam, (tokens, score) in zip(output.sequences, expected, strict=True):
            ours = beam.cum_logprob / len(tokens) ** params.length_penalty
            assert score is None or ours == pytest.approx(score, abs=1e-3)
