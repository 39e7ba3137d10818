"""The real scheduler over runners of several ranks, which plan and compute in step, against one."""

from pathlib import Path

import pytest
import torch
import transformers
from quantised_folders import METHODS, write_quantised

from engine_core.distributed.collectives import Collectives, SingleRank
from engine_core.model_runner.cpu.runner import CPUModelRunner
from protocol.sampling import SamplingParams
from tests.engine_core.distributed.rank_models import load_folder, rank_operations
from tests.engine_core.distributed.rank_processes import RankProcesses
from tests.engine_core.model_runner.engine_loop import EngineLoop, make_scheduler
from tests.engine_core.model_runner.runners import runner_config, spoiled

TOP = {"max_tokens": 6}
REQUESTS = {
    "greedy": SamplingParams(**TOP, temperature=0.0, logprobs=3),
    "seeded": SamplingParams(**TOP, seed=1),
    "prompt": SamplingParams(**TOP, seed=2, top_p=0.8, prompt_logprobs=4, logprobs=0),
    "penalised": SamplingParams(**TOP, seed=3, repetition_penalty=1.3, min_p=0.02),
    "biased": SamplingParams(**TOP, seed=4, logit_bias={5: 4.0, 130: 4.0}, top_k=20),
    "seedless": SamplingParams(**TOP),
}
FIELDS = ("token_ids", "logprobs")
Answers = tuple[
    dict[str, list[int]], dict[str, list[tuple[bytes, bytes]]], tuple[list[int], bytes, bytes]
]


def _answers(collectives: Collectives, folder: Path, names: list[str]) -> Answers:
    """(tokens, log-probabilities, those of a prompt: ranks, tokens and values)."""
    ops = rank_operations("native")
    model = load_folder(collectives, folder, ops)
    config = runner_config(model, ops, collectives=collectives)
    scheduler = make_scheduler(
        config.layout,
        num_blocks=config.layout.sizes(config.num_blocks),
        num_host_blocks=0,
        swap=False,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_model_len=64,
    )
    loop = EngineLoop(scheduler, spoiled(CPUModelRunner(config)), depth=1)
    for name in names:
        length = 5 + 9 * list(REQUESTS).index(name)
        prompt = torch.randint(
            131, (length,), generator=torch.Generator().manual_seed(length)
        ).tolist()
        loop.add(name, prompt, REQUESTS[name])
    loop.finish()
    tokens = {name: loop.tokens[name, 0] for name in names}
    reports = {name: loop.logprob_bytes[name, 0] for name in names}
    prompts = loop.prompt_logprobs["prompt"]
    ranks = [rank for report in prompts for rank in report.ranks]
    joined = [b"".join(getattr(report, name) for report in prompts) for name in FIELDS]
    return tokens, reports, (ranks, *joined)


SHAPE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
STATES = {"attn_layer_indices": [1], "mamba_n_heads": 6, "mamba_d_state": 10, "mamba_n_groups": 1}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "bamba": transformers.BambaConfig(**SHAPE, **STATES),
}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = CONFIGS[request.param]
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_give_the_tokens_of_one_rank(ranks: RankProcesses, folder: Path, size: int) -> None:
    names = list(REQUESTS)
    tokens, reports, prompts = _answers(SingleRank(), folder, names)
    answers = ranks.run(_answers, folder, names, tp_size=size)
    for answer in answers:
        assert answer == answers[0], "to the bit, and without a seed too"
    found, found_reports, found_prompts = answers[0]
    del found["seedless"], tokens["seedless"]
    assert found == tokens
    assert found_reports.keys() == reports.keys()
    for name, report in reports.items():
        for mine, theirs in zip(found_reports[name], report, strict=True):
            assert mine[0] == theirs[0]
            _assert_close(mine[1], theirs[1])
    assert found_prompts[:2] == prompts[:2]
    _assert_close(found_prompts[2], prompts[2])


def _assert_close(mine: bytes, theirs: bytes) -> None:
    values = [torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (mine, theirs)]
    torch.testing.assert_close(*values, atol=1e-4, rtol=1e-4)


def test_bits_of_a_request_do_not_depend_on_the_batch(ranks: RankProcesses, folder: Path) -> None:
    names = ["penalised", "seeded", "greedy", "prompt"]
    tokens, reports, prompts = ranks.run(_answers, folder, names, tp_size=3)[0]
    for name in ("greedy", "prompt"):
        alone = ranks.run(_answers, folder, [name], tp_size=3)[0]
        assert (alone[0][name], alone[1][name]) == (tokens[name], reports[name])
        assert name == "greedy" or alone[2] == prompts


def _bytes_by_format(collectives: Collectives, folder: Path) -> dict[str, int]:
    ops = rank_operations("native")
    load_folder(collectives, folder, ops)
    packing = ops.weight_packing(torch.float32)
    assert packing is not None
    return dict(packing.bytes_by_format())


@pytest.mark.parametrize("name", ["gptq 4 bits, symmetric", "awq"])
def test_ranks_that_part_groups_keep_codes_and_give_the_tokens_of_one_rank(
    ranks: RankProcesses, tmp_path: Path, name: str
) -> None:
    """Each has 96 inputs of o_proj and down_proj, of groups of 128 or 64."""
    torch.manual_seed(0)
    shape = {"hidden_size": 384, "intermediate_size": 384, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**SHAPE | shape, head_dim=32)
    write_quantised(tmp_path, transformers.LlamaForCausalLM(config), METHODS[name])
    names = ["greedy", "prompt"]
    tokens, *_ = _answers(SingleRank(), tmp_path, names)
    for answer in ranks.run(_answers, tmp_path, names, tp_size=4):
        assert answer[0] == tokens
    whole = _bytes_by_format(SingleRank(), tmp_path)
    parts = ranks.run(_bytes_by_format, tmp_path, tp_size=4)
    (codes,) = whole.keys() - {"float32"}
    assert sum(each[codes] for each in parts) == whole[codes]
    assert all(each.keys() == whole.keys() for each in parts)
