"""Scheduling options as clients feel them: swap, full queues, priorities, explanations."""

import pytest
from daemons import running_daemon
from raw_client import RawClient

from engine_core.observers.trace_lines import read_header, read_trace
from protocol.calls import GetRequestInfo
from protocol.errors import ErrorCode
from protocol.explanations import LookupEnd, WaitReason
from protocol.outputs import CallFailed
from protocol.requests import Call

PROMPTS = {f"r{number}": [number * 7 + k * 5 % 61 + 1 for k in range(40)] for number in range(6)}


def ask(client, request_id):
    return client.call(GetRequestInfo(request_id=request_id))


def run(model, num_sequences, *options):
    """Tokens of each sequence, and the statistics afterwards."""
    common = ("--no-enable-prefix-caching", "--watermark", 0)
    with (
        running_daemon(model, *common, *options) as daemon,
        RawClient(daemon.address) as client,
    ):
        for name, prompt in PROMPTS.items():
            client.request(
                name, prompt, fields={"num_sequences": num_sequences}, max_tokens=120,
                temperature=1.0, seed=len(name),
            )  # fmt: skip
        results = client.collect_sequences(*PROMPTS, timeout_s=120)
        tokens = {name: [t for t, _ in results[name]] for name in PROMPTS}
        return tokens, client.statistics()


@pytest.fixture(scope="module")
def expected(tiny_llama):
    """By number of sequences: tokens where nothing is preempted."""
    found = {}
    for num_sequences in (1, 2):
        found[num_sequences], statistics = run(tiny_llama, num_sequences, "--num-blocks", 400)
        assert statistics.num_preemptions == 0
    return found


@pytest.mark.parametrize(
    ("mode", "num_sequences"), [("recompute", 2), ("swap", 1), ("swap", 2), ("auto", 1)]
)
def test_a_preempted_request_goes_on_with_the_same_tokens(
    tiny_llama, expected, mode, num_sequences
):
    """Proves S111, S112: whatever way a request comes back, it says what it would have said."""
    host = () if mode == "recompute" else ("--host-cache-memory", "8MiB")
    small = ("--num-blocks", 40 * num_sequences // 2 + 4, "--preemption-mode", mode, *host)
    tokens, tight = run(tiny_llama, num_sequences, *small)
    assert tokens == expected[num_sequences]
    assert tight.num_preemptions > 0
    if mode == "swap":
        assert tight.num_preemptions_by_swap > 0
    if mode == "recompute":
        assert (tight.num_preemptions_by_swap, tight.num_host_blocks) == (0, 0)
    assert (tight.num_blocks_in_use, tight.num_host_blocks_in_use, tight.num_swapped) == (0, 0, 0)


def test_evicted_prompts_come_back_from_host_memory(tiny_llama):
    with (
        running_daemon(
            tiny_llama, "--num-blocks", 10, "--host-cache-memory", "8MiB", "--watermark", 0
        ) as daemon,
        RawClient(daemon.address) as client,
    ):
        first, second = (
            [client.complete(each, f"{name} {turn}")[0] for name, each in PROMPTS.items()]
            for turn in range(2)
        )
        statistics = client.statistics()
    assert first == second
    assert statistics.num_host_cached_prompt_tokens > 0


def test_requests_are_explained_while_they_wait_while_they_run_and_when_they_are_over(tiny_llama):
    with (
        running_daemon(tiny_llama, "--num-blocks", 64, "--max-num-seqs", 1) as daemon,
        RawClient(daemon.address) as client,
    ):
        client.request("first", PROMPTS["r0"], max_tokens=200)
        client.request("second", PROMPTS["r0"], max_tokens=4)
        client.request("third", PROMPTS["r1"][:5], max_tokens=4)
        while (running := ask(client, "first")).status != "running":
            pass
        assert (running.waits_for, running.num_requests_ahead) == (None, None)
        assert running.num_prompt_tokens == 40
        assert running.cache_lookup.ended is LookupEnd.NEVER_SEEN
        while (waiting := ask(client, "second")).waits_for is WaitReason.NOT_CONSIDERED:
            pass
        assert (waiting.status, waiting.waits_for) == ("waiting", WaitReason.SEQUENCES)
        assert waiting.num_requests_ahead == 0
        assert "1" in waiting.why
        assert ask(client, "third").num_requests_ahead == 1
        client.collect("first", "second", "third")
        over = ask(client, "second")
        assert (over.status, over.finish_reason) == ("finished", "length")
        assert (over.cache_lookup.num_tokens, over.cache_lookup.ended) == (32, LookupEnd.COMPLETE)
        assert ask(client, "third").cache_lookup.ended is LookupEnd.TOO_SHORT
        client.send(Call(call_id=99, call=GetRequestInfo(request_id="nobody")))
        failed = client.wait_for(CallFailed)
        assert (failed.call_id, failed.code) == (99, ErrorCode.UNKNOWN_REQUEST)


def order_of_ends(client, *names):
    """Names in the order in which their requests ended."""
    return list(client.collect_sequences(*names))


def test_under_policy_priority_the_urgent_one_goes_first(tiny_llama):
    """Proves S018, S044: the smaller number is served first, whatever came first."""
    with (
        running_daemon(
            tiny_llama, "--num-blocks", 64, "--max-num-seqs", 1, "--scheduling-policy", "priority"
        ) as daemon,
        RawClient(daemon.address) as client,
    ):
        client.request("running", PROMPTS["r0"], fields={"priority": -100}, max_tokens=150)
        while not client.statistics().num_running:
            pass
        for name, priority in (("low", 5), ("middle", 0), ("high", -5)):
            client.request(name, PROMPTS["r1"], fields={"priority": priority}, max_tokens=4)
        assert order_of_ends(client, "running", "low", "middle", "high") == [
            "running", "high", "middle", "low",
        ]  # fmt: skip


def test_an_urgent_request_takes_the_place_of_a_running_one_unless_that_is_off(tiny_llama):
    """Proves S080: forced preemption, also when memory is free."""
    for switch, expected in (
        ("--force-preemption", ["urgent", "lazy"]),
        ("--no-force-preemption", ["lazy", "urgent"]),
    ):
        with (
            running_daemon(
                tiny_llama, "--num-blocks", 64, "--max-num-seqs", 1,
                "--scheduling-policy", "priority", switch,
            ) as daemon,
            RawClient(daemon.address) as client,
        ):  # fmt: skip
            client.request("lazy", PROMPTS["r0"], fields={"priority": 9}, max_tokens=150)
            while not client.statistics().num_running:
                pass
            client.request("urgent", PROMPTS["r1"], fields={"priority": 0}, max_tokens=4)
            assert order_of_ends(client, "lazy", "urgent") == expected
            assert client.statistics().num_preemptions_forced == expected.index("lazy")


def test_under_policy_fair_a_flood_does_not_keep_a_polite_tenant_waiting(tiny_llama):
    with (
        running_daemon(
            tiny_llama, "--num-blocks", 64, "--max-num-seqs", 2, "--scheduling-policy", "fair",
            "--tenant-weight", "polite=2",
        ) as daemon,
        RawClient(daemon.address) as client,
    ):  # fmt: skip
        flood = [f"flood-{number}" for number in range(12)]
        for name in flood:
            client.request(name, PROMPTS["r0"], fields={"tenant": "flood"}, max_tokens=30)
        client.request("polite", PROMPTS["r1"], fields={"tenant": "polite"}, max_tokens=30)
        order = order_of_ends(client, *flood, "polite")
        assert order.index("polite") < 6


def test_a_run_is_recorded_from_its_first_request_to_its_last_step(tiny_llama, tmp_path):
    path = tmp_path / "run.jsonl.gz"
    with (
        running_daemon(tiny_llama, "--num-blocks", 64, "--trace", path) as daemon,
        RawClient(daemon.address) as client,
    ):
        for name, prompt in PROMPTS.items():
            client.request(name, prompt)
        client.collect(*PROMPTS)
        assert daemon.stop() == 0
    config = read_header(path).config
    assert config["scheduler"]["max_num_batched_tokens"] == 512
    assert config["scheduler"]["max_num_shared_tokens"] == 128
    assert config["num_blocks"] == 64
    assert [group["reach"] for group in config["groups"]] == [None]
    events = list(read_trace(path))
    kinds = [type(event).__name__ for event in events]
    assert kinds.count("TraceArrival") == len(PROMPTS)
    assert kinds[-1] == "TraceStep"
    tokens = sum(sum(event.nums) for event in events if type(event).__name__ == "TraceStep")
    assert tokens == sum(len(prompt) + 7 for prompt in PROMPTS.values())
