"""Thousands of random requests to random models, with drafts and without: by hand, from the root.

python -m tests.engine_core.model_runner.draft_campaign --num-rounds 200
"""

import argparse
import random
import sys
from pathlib import Path

import msgspec
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

from drafting_loop import DraftingLoop
from engine_loop import EngineLoop
from made_up_grammar import MadeUpGrammar, constrain
from runners import runner_config, spoiled
from same_answers import V, draw_params
from test_drafts import run

from engine_core.kv_cache import KVCacheGroupSpec, KVCacheManager
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.models.loading import load_model
from engine_core.scheduler import SchedulerConfig
from engine_core.scheduler.rules.token_rules import TokenRules
from engine_core.speculation.ngram import NgramProposer
from engine_core.speculation.suffix import SuffixProposer
from engine_core.startup.scheduler import build_scheduler
from kernels.cpu.operations import CpuOperations
from protocol.outputs import FinishReason, Logprobs
from protocol.sampling import RepetitionDetection, ThinkingBudget
from tests.native_kernels import native_library_or_skip

FAMILIES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma3": transformers.Gemma3TextConfig,
}
WEIGHTS = ("float32", "float32", "int8", "int4")
KV_DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.int8)


def draw_model(draw, library):
    """Family, shape, window, and format of weights and cache at random."""
    family, weights = draw.choice([*FAMILIES]), draw.choice(WEIGHTS)
    heads, head_dim = draw.choice([(2, 1), (4, 2), (6, 3), (3, 3)]), draw.choice([8, 16, 32])
    shape = {
        "vocab_size": V,
        "hidden_size": 96 if weights == "int4" else draw.choice([36, 60, 96]),
        "intermediate_size": 96 if weights == "int4" else draw.choice([50, 96]),
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 32 if weights == "int4" else head_dim,
        "num_hidden_layers": draw.randint(1, 4),
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "tie_word_embeddings": draw.random() < 0.5,
    }
    if family == "mistral":
        shape["sliding_window"] = draw.choice([None, 5, 16])
    if family == "gemma3":
        shape |= {"sliding_window": draw.choice([3, 9, 16]), "query_pre_attn_scalar": 11}
        kinds = ["sliding_attention", "full_attention"]
        shape["layer_types"] = [draw.choice(kinds) for _ in range(shape["num_hidden_layers"])]
    reference = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](**shape)).eval()
    ops = CpuOperations(library, linear_weights=weights)
    model = load_model(
        reference.config.to_dict(), reference.state_dict().items(), dtype=torch.float32, ops=ops
    )
    return model, ops, f"{family} {weights}"


def draw_requests(draw, number):
    """(name, prompt, parameters, samples): some prompts go on from others, so that blocks are
    found again; parameters of every kind."""
    prompts = []
    for at in range(number):
        prompt = [draw.randrange(V) for _ in range(draw.choice([1, 3, 8, 17, 30]))]
        if prompts and draw.random() < 0.4:
            prompt = [*draw.choice(prompts), *prompt][:42]
        if draw.random() < 0.4:  # something to look up
            prompt = (prompt * 4)[:42]
        prompts.append(prompt)
        params = draw_params(draw, max_tokens=draw.randint(2, 20))
        fields = {"ignore_eos": draw.random() < 0.3}
        if draw.random() < 0.15:
            fields["prompt_logprobs"] = draw.choice([0, 2, V])
        if draw.random() < 0.15:
            words = [tuple(draw.sample(range(V), draw.randint(1, 3))) for _ in range(40)]
            fields["bad_words"] = tuple(words)
        if draw.random() < 0.1:
            fields |= {"logprobs": 3, "logprob_token_ids": (1, 5, 9)}
        if draw.random() < 0.1:
            fields["repetition_detection"] = RepetitionDetection(4, 1, 2)
        if draw.random() < 0.1:
            fields["thinking"] = ThinkingBudget(draw.randint(0, 5), 11, 12)
        yield f"r{at}", prompt, msgspec.structs.replace(params, **fields), draw.choice([1, 1, 1, 3])


def one_round(seed: int) -> tuple[int, int, int]:
    """Requests, drafts and accepted ones. Raises AssertionError: something differs."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model, ops, name = draw_model(draw, native_library_or_skip())
    kv_dtype, most = draw.choice(KV_DTYPES), draw.choice([55, 70, 120])
    num_groups = runner_config(model, ops).num_groups
    # three samples of the longest request must fit alone
    blocks = {"num_blocks": most * num_groups, "num_host_blocks": 60}
    config = runner_config(model, ops, kv_dtype=kv_dtype, **blocks)
    options = {
        "preemption_mode": draw.choice(["swap", "recompute"]),
        "max_num_batched_tokens": draw.choice([16, 64, 200]),
        "batching": draw.choice(["mixed", "mixed", "prefill-first"]),
    }
    if options["batching"] == "prefill-first":
        options["max_num_batched_tokens"] = 200
    caches, has_rules = draw.random() < 0.7, draw.random() < 0.8
    is_led, forces = draw.random() < 0.4, draw.random() < 0.5
    requests = [
        each for each in draw_requests(draw, 40) if has_rules or not each[2].has_token_rules
    ]

    def made(kind, *, proposer=None, **more):
        settings = {"max_num_seqs": 8, "max_model_len": 64, **options}
        if proposer is not None:
            settings["num_speculative_tokens"] = draw.randint(1, 9)
        kv_cache = KVCacheManager(
            block_size=4,
            watermark=0.0,
            enable_prefix_caching=caches,
            groups=tuple(KVCacheGroupSpec(each.sliding_window) for each in config.layout.groups),
            **blocks,
        )
        scheduler = build_scheduler(SchedulerConfig(**settings), kv_cache, proposer=proposer)
        grammar = MadeUpGrammar(V, drafts_forced=forces)
        if is_led:
            grammar.lead(scheduler)
        if has_rules:
            constrain(scheduler, TokenRules(grammar, vocab_size=V))
        runner = spoiled(CPUModelRunner(config))
        loop = kind(scheduler, runner, depth=1, **more)
        if proposer is not None:
            scheduler_time(loop)
        return run(loop, requests, seed=draw.random())

    plain = made(EngineLoop)
    others = [
        made(DraftingLoop, answers=plain.tokens, vocab_size=V, seed=seed, most=9),
        made(EngineLoop, proposer=NgramProposer(smallest=draw.randint(1, 3), largest=4)),
        made(EngineLoop, proposer=SuffixProposer()),
    ]
    # if one of several samples fails, the others end where they are; a prompt's last chunk is not
    # reported of a request that fails at its first token
    ended = {name for (name, _), reason in plain.ends.items() if reason is FinishReason.ERROR}
    several = {name for name, _, _, number in requests if number > 1}
    failed = {key for key in plain.tokens if key[0] in ended & several}
    drafted = accepted = 0
    for other in others:
        why = f"round {seed}: {name}, {kv_dtype}, {options}"
        assert other.ends.keys() == plain.ends.keys(), why
        for key in plain.tokens.keys() - failed:
            assert other.ends[key] == plain.ends[key], why
            assert other.tokens[key] == plain.tokens[key], why
            assert other.logprobs[key] == plain.logprobs[key], why
            assert other.logprob_bytes[key] == plain.logprob_bytes[key], why
        for name in plain.prompt_logprobs.keys() - ended:
            reports = [Logprobs.joined(loop.prompt_logprobs[name]) for loop in (other, plain)]
            assert reports[0] == reports[1], why
        counted = other.scheduler.statistics()
        drafted += counted.num_draft_tokens
        accepted += counted.num_accepted_tokens
    return len(requests) * len(others), drafted, accepted


def scheduler_time(loop):
    """Steps of this loop take time, so that the price of drafts is known to the scheduler."""
    scheduler, now = loop.scheduler, [0.0]
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def later(plan, output):
        now[0] += 0.01 + 0.0005 * plan.total_num_scheduled_tokens
        return update(plan, output, now=now[0])

    scheduler.schedule = lambda: schedule(now=now[0])
    scheduler.update_from_output = later


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-rounds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    totals = [0, 0, 0]
    for seed in range(options.first, options.first + options.num_rounds):
        totals = [old + new for old, new in zip(totals, one_round(seed), strict=True)]
        if seed % 10 == 9:
            print(seed, totals, flush=True)
    requests, drafted, accepted = totals
    print(f"{requests} requests equal, {drafted} drafts, {accepted} accepted")


if __name__ == "__main__":
    main()
