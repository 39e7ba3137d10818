"""The same bits for a request whatever runs beside it, on native CPU kernels: SmolLM2 from its GGUF
file's own blocks, and float32 and quantised weights of other models.

Products of quantised weights are exact integer sums in groups, joined in a fixed order; float32
products, attention and sampling have fixed orders, too. So tokens and log-probabilities are
compared bit for bit. How far logits are from the dequantised model's: test_gguf_blocks.
"""

import contextlib
import json
from pathlib import Path

import pytest
from daemons import Daemon, running_daemon
from raw_client import RawClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_OUTPUT = 12
LENGTHS = [1, 2, 15, 16, 17, 31, 33, 47, 63, 64, 65, 90, 127, 128, 129, 200] * 2
ALONE = (0, 5, 15)
NATIVE_WEIGHTS = "Q4_1+Q8_0"


@pytest.fixture(scope="module", autouse=True)
def native_kernels():
    from tests.native_kernels import native_library_or_skip

    native_library_or_skip()


@pytest.fixture(scope="module")
def prompts(smollm2):
    """32 prompts of real text, of 1 to 200 tokens: this project's licence, from many places."""
    from tokenizers import Tokenizer

    from engine_core.model_files import open_model_files

    files = open_model_files(str(smollm2), report=print)
    tokenizer = Tokenizer.from_str(files.tokenizer().tokenizer_json.decode())
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    token_ids = tokenizer.encode(" ".join(text.split()), add_special_tokens=False).ids
    return [token_ids[number * 61 : number * 61 + length] for number, length in enumerate(LENGTHS)]


def short(prompts):
    """Prompts of nearly a block: many are admitted, and each soon needs another block."""
    return [prompt[:14] for prompt in prompts if len(prompt) >= 14]


def run_all(client, prompts, prefix=""):
    """Greedy tokens, and the bytes of their log-probabilities, of each prompt, all at once."""
    names = [f"{prefix}{number}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        client.request(name, prompt, max_tokens=NUM_OUTPUT, logprobs=2)
    results = client.collect(*names, timeout_s=240)
    return [(results[name][0], client.logprobs.pop(name)) for name in names]


@pytest.fixture(scope="module")
def together(smollm2, prompts):
    """All at once, on two threads, the same again from the cache, and some alone: the answers to
    each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "2")
        daemon = Daemon(smollm2, "--max-model-len", 512)
    with contextlib.closing(daemon), RawClient(daemon.address) as client:
        assert daemon.ready["weights"] == NATIVE_WEIGHTS
        answers = {"short": run_all(client, short(prompts), "short")}
        answers["together"] = run_all(client, prompts)
        before = client.statistics().num_cached_prompt_tokens
        answers["cached"] = run_all(client, prompts, "cached")
        assert client.statistics().num_cached_prompt_tokens - before > sum(LENGTHS) // 2
        return answers


def test_every_answer_has_its_log_probabilities(together):
    for tokens, logprobs in together["together"]:
        assert len(tokens) == NUM_OUTPUT
        assert len(logprobs) >= 4 * 3 * NUM_OUTPUT


def test_the_same_bits_from_the_prefix_cache(together):
    assert together["cached"] == together["together"]


def test_the_same_bits_alone_in_chunks_and_with_the_option_that_asks_for_it(
    smollm2, prompts, together
):
    options = ("--max-num-batched-tokens", 48, "--no-enable-prefix-caching", "--batch-invariant")
    with (
        running_daemon(smollm2, "--max-model-len", 512, *options) as daemon,
        RawClient(daemon.address) as client,
    ):
        for number in ALONE:
            assert run_all(client, [prompts[number]], f"alone{number}-") == [
                together["together"][number]
            ]
        assert run_all(client, prompts[8:24]) == together["together"][8:24]


def test_the_same_bits_after_preemptions(smollm2, prompts, together):
    with (
        running_daemon(smollm2, "--num-blocks", 16, "--watermark", 0) as daemon,
        RawClient(daemon.address) as client,
    ):
        assert run_all(client, short(prompts)) == together["short"]
        assert client.statistics().num_preemptions >= 5


def test_the_second_start_takes_packed_weights_from_the_cache(smollm2, tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINE_CORE_CACHE", str(tmp_path))
    answers, logs = [], []
    for _ in range(2):
        with (
            running_daemon(smollm2, "--max-model-len", 64) as daemon,
            RawClient(daemon.address) as client,
        ):
            answers.append(run_all(client, [[1, 2, 3, 4]]))
            logs.append(daemon.log())
            assert daemon.ready["weights"] == NATIVE_WEIGHTS
    assert answers[0] == answers[1]
    assert ["kept packed weights" in log for log in logs] == [True, False]


@pytest.fixture(scope="module")
def few_layers(tmp_path_factory):
    """SmolLM2's shapes, in three layers and with a small vocabulary."""
    file = tmp_path_factory.mktemp("shape") / "few-layers.json"
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 2000, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "eos_token_id": 1,
    }  # fmt: skip
    file.write_text(json.dumps(shape))
    return file


@pytest.mark.parametrize("weights", [("--dtype", "float32"), ("--quantization", "int8")])
def test_the_same_bits_of_floats_and_of_what_they_are_quantised_to(few_layers, weights):
    """Together; in chunks, alone; and preempted."""
    lengths = (1, 14, 14, 14, 14, 30, 46, 63, 64, 65, 130)
    prompts = [[(7 * n + 11 * i) % 2000 for i in range(n)] for n in lengths]
    model = ("--load-format", "dummy", "--model-config", few_layers, *weights, "--batch-invariant")
    daemons = {}
    for name, options in {
        "together": (),
        "in chunks": ("--max-num-batched-tokens", 24, "--no-enable-prefix-caching"),
        "preempted": ("--num-blocks", 10, "--watermark", 0),
    }.items():
        with running_daemon(None, *model, *options) as daemon, RawClient(daemon.address) as client:
            daemons[name] = run_all(client, prompts)
            if name == "in chunks":
                alone = [run_all(client, [prompt], "alone")[0] for prompt in prompts]
                assert alone == daemons[name]
            if name == "preempted":
                assert client.statistics().num_preemptions >= 1
    assert daemons["in chunks"] == daemons["together"]
    assert daemons["preempted"] == daemons["together"]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_floats_are_quantised_at_load(tiny_llama, quantization):
    """The tiny model's 48 inputs are no whole groups of 32."""
    prompts = [[5, 9, 33], [7] * 40]
    with (
        running_daemon(tiny_llama, "--quantization", quantization) as daemon,
        RawClient(daemon.address) as client,
    ):
        answers = run_all(client, prompts)
        assert [run_all(client, [prompt])[0] for prompt in prompts] == answers
        # a vocabulary keeps 8 bits
        assert daemon.ready["weights"] == ("int8" if quantization == "int8" else "int4+int8")
