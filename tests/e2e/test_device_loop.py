"""The whole engine with the device runner and a step in flight serves what the plain one serves."""

import json
from pathlib import Path

import pytest
from daemons import running_daemon
from raw_client import RawClient

from protocol.outputs import FinishReason
from protocol.requests import Abort

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "eos_token_id": 96,
}  # fmt: skip
HYBRID = CONFIG | {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "head_dim": 8,
    "num_hidden_layers": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 10, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
DEVICE_LOOP = ("-c", Path(__file__).with_name("device_loop_engine.py").read_text())

REQUESTS = {
    "greedy": {"prompt": [5, 6, 7], "max_tokens": 20},
    "sampled": {"prompt": [8] * 30, "temperature": 1.0, "seed": 3, "max_tokens": 16},
    "truncated": {"prompt": [9, 3], "temperature": 0.9, "seed": 4, "top_k": 20, "top_p": 0.9},
    "penalised": {"prompt": [1, 2] * 20, "frequency_penalty": 1.0, "max_tokens": 16},
    "may end": {"prompt": [4] * 9, "temperature": 2.0, "seed": 5, "ignore_eos": False,
                "max_tokens": 24},
    "stops": {"prompt": [6] * 5, "temperature": 2.0, "seed": 6, "max_tokens": 24,
              "stop_token_ids": tuple(range(0, 97, 3))},
    "held": {"prompt": [7, 7], "temperature": 1.0, "seed": 7, "allowed_token_ids": (3, 5, 9)},
    "one": {"prompt": [2], "max_tokens": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def options(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("shape") / "tiny.json"
    file.write_text(json.dumps(getattr(request, "param", CONFIG)))
    # a cache that does not hold all of them, and steps that cut prompts
    return [
        "--load-format", "dummy", "--model-config", file, "--num-blocks", 24, "--block-size", 4,
        "--max-num-batched-tokens", 24, "--max-num-seqs", 6,
    ]  # fmt: skip


def serve_all(daemon):
    """Tokens and reason of each request, all sent at once."""
    with RawClient(daemon.address) as client:
        for name, fields in REQUESTS.items():
            params = {key: value for key, value in fields.items() if key != "prompt"}
            client.request(name, fields["prompt"], **params)
        ended = client.collect(*REQUESTS)
        answers = {name: (tokens, end.finish_reason) for name, (tokens, end) in ended.items()}
        return answers, client.statistics()


@pytest.mark.parametrize("options", [CONFIG, HYBRID], ids=["llama", "hybrid"], indirect=True)
def test_every_request_gets_the_tokens_of_the_plain_engine(options):
    with running_daemon(None, *options) as plain:
        expected, _ = serve_all(plain)
        assert plain.stop() == 0
    assert expected["stops"][1] is FinishReason.STOP
    with running_daemon(None, *options, program=DEVICE_LOOP) as daemon:
        answers, statistics = serve_all(daemon)
        assert answers == expected
        assert statistics.num_preemptions > 0
        assert statistics.num_blocks_in_use == 0
        again, _ = serve_all(daemon)  # out of the prefix cache
        assert again == expected
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log()


def test_samples_logprobs_and_aborts_pass_through_a_step_in_flight(options):
    with (
        running_daemon(None, *options, program=DEVICE_LOOP) as daemon,
        RawClient(daemon.address) as client,
    ):
        client.request("gone", [3, 3, 3], max_tokens=100)
        client.request("told", [5, 6, 7], max_tokens=10, logprobs=2)
        client.request(
            "many", [9] * 10, max_tokens=10, temperature=1.0, seed=1,
            fields={"num_sequences": 3},
        )  # fmt: skip
        client.send(Abort(request_ids=("gone",)))
        ended = client.collect_sequences("gone", "told", "many")
        assert ended["gone"][0][1].finish_reason is FinishReason.ABORT
        assert len(ended["told"][0][0]) == 10
        samples = [tuple(tokens) for tokens, _ in ended["many"]]
        assert [len(tokens) for tokens in samples] == [10, 10, 10]
        assert len(set(samples)) == 3
        assert client.statistics().num_blocks_in_use == 0
        assert daemon.stop() == 0
