"""`engine-client complete` and `info` against a scripted engine."""

import json
import signal
import subprocess
import sys

import pytest
from fake_engine import wait_until
from fake_model import EOS_ID, ids_of, saying
from msgspec.structs import replace

from frontend import LLM
from frontend.cli.app import run_command_line
from protocol.explanations import PromptChange


@pytest.fixture
def run(capsys):
    def run_it(*arguments):
        code = run_command_line(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_it


def program(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "frontend.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_text_is_streamed_to_stdout_and_nothing_else(run, start_engine, address):
    start_engine(next_token=saying("漢字 and 🎉.", then_eos=True))
    assert run("complete", "Say it", "--address", address) == (0, "漢字 and 🎉.\n", "")
    assert run("complete", "Say it", "--no-stream", "--address", address)[1] == "漢字 and 🎉.\n"


def test_options_reach_the_engine_over_the_models_own_defaults(run, start_engine, address):
    engine = start_engine()
    options = ["--max-tokens", "3", "--top-p", "0.5", "--seed", "0", "--min-p", "0.1"]
    options += ["--temperature", "0", "--extra-args", '{"a": [1]}']
    assert run("complete", "Hi", "--address", address, *options)[0] == 0
    params = engine.requests[0].sampling_params
    assert engine.requests[0].prompt_token_ids == ids_of("Hi")
    assert (params.max_tokens, params.top_p, params.seed, params.min_p) == (3, 0.5, 0, 0.1)
    assert (params.temperature, params.top_k) == (0, 7)
    assert json.loads(params.extra_args) == {"a": [1]}
    text = ["complete", "Hi", "--address", address, "--max-tokens"]
    code, _, error = run(*text, "100000", "--ignore-eos")
    assert code == 0 and "tokens is full, before --max-tokens 100000" in error
    assert run(*text, "3")[2] == ""
    code, _, error = run("complete", "Hi", "--address", address, "--extra-args", "{")
    assert code == 2 and "--extra-args is no JSON" in error


@pytest.mark.parametrize("options", [[], ["--chat"]])
def test_a_model_that_recommends_nothing_is_sampled_like_elsewhere(
    run, start_engine, address, options
):
    engine = start_engine(recommends=False)
    assert run("complete", "Hi", "--address", address, "--max-tokens", "3", *options)[0] == 0
    params = engine.requests[0].sampling_params
    assert (params.temperature, params.top_k, params.top_p) == (0.8, 40, 0.95)
    with LLM(address=address) as llm:  # in Python as with vLLM
        llm.generate("Hi", use_tqdm=False)
    params = engine.requests[1].sampling_params
    assert (params.temperature, params.top_k, params.top_p) == (1.0, 0, 1.0)


def test_json_is_one_document_with_tokens_reasons_usage_and_timings(run, start_engine, address):
    start_engine(next_token=saying("abc", then_eos=True))
    code, out, err = run("complete", "Hi", "--json", "--logprobs", "2", "--address", address)
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["text"] == "abc"
    assert document["token_ids"] == [*ids_of("abc"), EOS_ID]
    assert document["finish_reason"] == "stop"
    assert document["stop_reason"] is None
    assert document["usage"]["prompt_tokens"] == 2
    assert document["usage"]["completion_tokens"] == 4
    assert document["usage"]["total_tokens"] == 6
    assert 0 < document["timings"]["first_token_s"] <= document["timings"]["finished_s"]
    assert [entry["token"] for entry in document["logprobs"][:3]] == ["a", "b", "c"]
    assert document["logprobs"][0]["logprob"] == -0.5


def test_stop_strings_may_be_repeated_and_the_first_found_ends_the_text(run, start_engine, address):
    start_engine(next_token=saying("one two three "))
    arguments = ["--stop", "three", "--stop", "two", "--json", "--address", address]
    document = json.loads(run("complete", "Hi", *arguments)[1])
    assert (document["text"], document["stop_reason"]) == ("one ", "two")


def test_several_completions_are_told_apart(run, start_engine, address):
    start_engine(next_token=saying("x", then_eos=True))
    code, out, _ = run("complete", "Hi", "--n", "2", "--address", address)
    assert (code, out) == (0, "--- 0 ---\nx\n--- 1 ---\nx\n")
    document = json.loads(run("complete", "Hi", "--n", "2", "--json", "--address", address)[1])
    assert [output["text"] for output in document["outputs"]] == ["x", "x"]


def test_chat_option_sends_the_templates_text(run, start_engine, address):
    engine = start_engine(next_token=saying("x", then_eos=True))
    run("complete", "Hi", "--chat", "--system", "Be brief", "--address", address)
    assert engine.requests[0].prompt_token_ids == ids_of("system:Be brief;user:Hi;")


def test_prompt_may_come_from_stdin(start_engine, address):
    engine = start_engine(next_token=saying("x", then_eos=True))
    process = program("complete", "--address", address, stdin=subprocess.PIPE)
    assert process.communicate("from a pipe", timeout=30) == ("x\n", "")
    assert engine.requests[0].prompt_token_ids == ids_of("from a pipe")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["complete", "Hi", "--temperature", "hot"], "temperature"),
        (["complete", "Hi", "--logprobs", "2"], "add --json"),
        (["complete", "Hi", "--system", "x"], "add --chat"),
        (["complete", "Hi", "--top-p", "2"], "top_p is 2.0"),
        (["complete", "Hi", "--n", "2", "--temperature", "0"], "greedy"),
        (["complete", "Hi", "--max-tokens", "1", "--min-tokens", "2"], "min_tokens is 2"),
        (["chat", "--temperature", "-1"], "temperature is -1"),
        (["sing"], "sing"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(run, start_engine, address, arguments, words):
    start_engine()
    if arguments[0] != "sing":
        arguments = [*arguments, "--address", address]
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_missing_daemon_is_one_line_with_the_next_action_and_exit_code_1(run, address):
    for command in (["complete", "Hi"], ["chat"], ["info"]):
        code, out, err = run(*command, "--address", address)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "engine-core --model" in err


def test_failure_in_the_engine_is_reported_behind_the_text(run, start_engine, address):
    start_engine(
        next_token=saying("abc"),
        fail=lambda _request, number: "out of luck" if number == 3 else None,
    )
    code, out, err = run("complete", "Hi", "--address", address)
    assert (code, out) == (1, "abc\n")
    assert "out of luck" in err


def test_engine_that_dies_in_the_stream_is_reported_in_one_line(run, start_engine, address):
    start_engine(next_token=saying("abc"), die_after_tokens=3)
    code, out, err = run("complete", "Hi", "--address", address, "--reconnect-timeout", "0.2")
    assert (code, out, err.count("\n")) == (1, "abc\n", 1)
    assert address in err
    assert "is gone" in err


def test_interrupt_aborts_the_request_and_exits_with_130(start_engine, address):
    engine = start_engine(next_token=saying("tick "), step_s=0.01)
    process = program("complete", "Hi", "--ignore-eos", "--address", address)
    assert process.stdout.read(5) == "tick "
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    wait_until(lambda: engine.num_live == 0)


def test_reader_of_the_output_may_leave_early(start_engine, address):
    engine = start_engine(next_token=saying("tick "), step_s=0.01)
    process = program("complete", "Hi", "--address", address)
    assert process.stdout.read(5) == "tick "
    process.stdout.close()
    assert process.wait(30) == 1
    assert "Traceback" not in process.stderr.read()
    wait_until(lambda: engine.num_live == 0)


def test_info_shows_model_limits_and_statistics(run, start_engine, address):
    start_engine()
    document = json.loads(run("info", "--json", "--address", address)[1])
    assert document["model"]["name"] == "fake"
    assert document["model"]["max_model_len"] == 512
    assert document["model"]["tokenizer"]["has_chat_template"] is True
    assert document["statistics"]["num_blocks"] == 64
    code, out, err = run("info", "--address", address)
    assert (code, err) == (0, "")
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    assert len(lines) <= 12
    assert lines["model"].strip() == "fake (Fake, Q4_1+Q8_0, KV cache int8, native)"
    assert lines["longest"].strip() == "512 tokens, prompt and answer"
    assert lines["requests"].strip() == "0 running, 0 waiting"
    assert lines["KV cache"].strip() == "0 of 64 blocks in use, 0 cached; 16 tokens each"


def test_options_of_the_connection_may_stand_before_the_command(run, start_engine, address):
    start_engine(next_token=saying("yes", then_eos=True))
    assert run("--address", address, "complete", "Hi") == (0, "yes\n", "")
    before = [f"--address={address}", "--reconnect-timeout", "5", "--connect-timeout=5"]
    assert run(*before, "complete", "--no-stream", "Hi") == (0, "yes\n", "")
    code, out, err = run("--address", address)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--help" in err


def test_a_model_without_a_chat_template_is_told_from_a_fault_of_the_engine(
    run, start_engine, address, tmp_path
):
    engine = start_engine(chat_template=None, next_token=saying("x", then_eos=True))
    for command in (["chat"], ["complete", "Hi", "--chat"]):
        code, out, err = run(*command, "--address", address)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "engine-client complete" in err
        assert "--chat-template FILE" in err
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    options = ["--address", address, "--chat-template"]
    assert run("complete", "Hi", "--chat", *options, str(template)) == (0, "x\n", "")
    assert engine.requests[0].prompt_token_ids == ids_of("<Hi>")
    assert "add --chat" in run("complete", "Hi", *options, str(template))[2]
    code, _, err = run("chat", *options, str(tmp_path / "none"))
    assert (code, err.count("\n")) == (2, 1)
    assert "none cannot be read: No such file" in err


def test_a_model_without_a_tokenizer_says_what_to_do(run, start_engine, address):
    start_engine(with_tokenizer=False)
    code, _, err = run("chat", "--address", address)
    assert (code, err.count("\n")) == (2, 1)
    assert "engine-core --tokenizer" in err


def test_help_and_version_need_no_engine_and_load_no_library_of_a_model():
    code = (
        "import sys; from frontend.cli.app import run_command_line; run_command_line(['--help']);"
        "print(sorted({'tokenizers', 'jinja2', 'zmq', 'numpy', 'torch'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("[]")
    assert "complete" in done.stdout


def test_a_request_is_explained_as_text_and_as_json(run, start_engine, address):
    engine = start_engine()
    engine.step = lambda: None  # nothing happens before it is asked
    before, was, now = map(ids_of, ("Today is\n18:4", "1. Be", "2. Be"))
    change = PromptChange(position=37, num_same=11_902, before=before, was=was, now=now)
    do = engine.do

    def explained(call):
        found = do(call)
        return replace(found, prompt_change=change) if hasattr(found, "prompt_change") else found

    engine.do = explained
    waiting = program("complete", "Hi", "--max-tokens", "400", "--address", address)
    try:
        wait_until(lambda: engine.requests)
        [request_id] = json.loads(run("info", "--requests", "--json", "--address", address)[1])
        assert run("info", "--requests", "--address", address)[1] == f"{request_id}\n"
        code, out, err = run("info", "--request", request_id, "--address", address)
        assert (code, err) == (0, "")
        lines = [" ".join(line.split()) for line in out.splitlines()]
        assert "waits_for blocks" in lines
        assert "why needs 9 blocks, 3 are free" in lines
        assert "ended evicted" in lines
        assert "mode recompute" in lines
        advice = (
            "advice the prompt differs from the one before at token 37 of 2: '...Today is 18:4|2. "
            "Be...', which was '|1. Be...'; the 11,902 tokens behind it are the same"
        )
        assert any(line.startswith(advice) for line in lines)
        assert "prompt_change" not in out
        document = json.loads(
            run("info", "--request", request_id, "--json", "--address", address)[1]
        )
        assert document["request_id"] == request_id
        assert document["cache_lookup"]["num_tokens"] == 32
        assert document["preemptions"][0]["num_blocks"] == 3
        assert document["prompt_change"]["position"] == 37
        assert document["finish_reason"] is None
    finally:
        waiting.kill()
        waiting.wait()


def test_an_unknown_request_is_a_fault_and_two_questions_at_once_are_refused(
    run, start_engine, address
):
    start_engine()
    code, out, err = run("info", "--request", "unknown", "--address", address)
    assert (code, out) == (1, "")
    assert "who is that" in err
    assert run("info", "--request", "a", "--requests", "--address", address)[0] == 2


def test_priority_and_tenant_reach_the_engine(run, start_engine, address):
    engine = start_engine()
    turn = ["--priority", "-3", "--tenant", "team", "--max-tokens", "2"]
    assert run("complete", "Hi", "--address", address, *turn)[0] == 0
    assert run("complete", "Hi", "--chat", "--n", "2", "--address", address, *turn)[0] == 0
    assert [(r.priority, r.tenant, r.num_sequences) for r in engine.requests] == [
        (-3, "team", 1), (-3, "team", 2),
    ]  # fmt: skip
