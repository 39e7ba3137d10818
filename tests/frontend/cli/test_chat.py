"""`engine-client chat` from a pipe and at a pseudo-terminal, against a scripted engine."""

import contextlib
import io
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from fake_model import TOKENIZER, ids_of, saying

from frontend.cli.app import run_command_line


def chat(address, text, *options):
    done = subprocess.run(
        [sys.executable, "-m", "frontend.cli", "chat", "--address", address, *options],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def wait_until(is_so, timeout_s=10):
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def terminal(address):
    """A chat at a pseudo-terminal: `wait_for(text)`, `type(text)`, the process."""
    sessions = []

    class Terminal:
        def __init__(self, *options):
            self._master, slave = pty.openpty()
            command = [sys.executable, "-m", "frontend.cli", "chat", "--address", address, *options]
            self.process = subprocess.Popen(
                command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
            )
            os.close(slave)
            self.seen = ""
            sessions.append(self)

        def type(self, text):
            os.write(self._master, text.encode())

        def wait_for(self, text, timeout_s=30):
            """Reads until `text` is there; forgets what came before it."""
            assert self.is_seen(text, timeout_s), self.seen
            self.seen = self.seen.split(text, 1)[1]

        def is_seen(self, text, timeout_s):
            deadline = time.monotonic() + timeout_s
            while text not in self.seen:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                if select.select([self._master], [], [], left_s)[0]:
                    try:
                        self.seen += os.read(self._master, 4096).decode(errors="replace")
                    except OSError:  # the program has ended
                        return text in self.seen
            return True

        def interrupt_until(self, text):
            """Ctrl-C, again if it came between the prompt and the read: readline misses that."""
            for _ in range(100):
                self.process.send_signal(signal.SIGINT)
                if self.is_seen(text, timeout_s=0.3):
                    break
            self.wait_for(text)

        def close(self):
            self.process.kill()
            self.process.wait()
            with contextlib.suppress(OSError):
                os.close(self._master)

    yield Terminal
    for session in sessions:
        session.close()


def test_turns_from_a_pipe_are_answered_in_order_with_the_history(start_engine, address):
    engine = start_engine(next_token=saying("yes", then_eos=True))
    assert chat(address, "one\n\ntwo\n", "--system", "S") == (0, "yes\nyes\n", "")
    assert [request.prompt_token_ids for request in engine.requests] == [
        ids_of("system:S;user:one;"),
        ids_of("system:S;user:one;assistant:yes;user:two;"),
    ]


def test_reset_forgets_the_turns_and_keeps_the_system_message(start_engine, address):
    engine = start_engine(next_token=saying("yes", then_eos=True))
    code, out, _ = chat(address, "one\n/reset\ntwo\n/exit\nthree\n", "--system", "S")
    assert (code, out) == (0, "yes\nyes\n")
    assert engine.requests[-1].prompt_token_ids == ids_of("system:S;user:two;")


def test_unknown_command_is_named(start_engine, address):
    start_engine()
    code, out, err = chat(address, "/rest\n")
    assert (code, out) == (1, "")
    assert "no command /rest" in err


def test_too_long_history_says_how_long_and_what_to_do(start_engine, address):
    start_engine(next_token=saying("yes", then_eos=True))
    code, out, err = chat(address, "one\n" + "x" * 600 + "\n")
    assert (code, out) == (1, "yes\n")
    assert "the limit is 511 (max_model_len 512 less one" in err
    assert err.endswith("; /reset starts over\n")


def test_engine_that_dies_in_an_answer_is_reported_in_one_line(
    start_engine, address, monkeypatch, capsys
):
    start_engine(next_token=saying("tick "), die_after_tokens=10)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    arguments = ["chat", "--address", address, "--reconnect-timeout", "0.2"]
    assert run_command_line(arguments) == 1
    out, err = capsys.readouterr()
    assert out == "tick tick \n"
    assert err.startswith("engine-client: ")
    assert "is gone" in err
    assert err.count("\n") == 1


def test_interrupt_stops_the_answer_and_not_the_program(start_engine, terminal):
    engine = start_engine(next_token=saying("tick "), step_s=0.01)
    session = terminal()
    session.wait_for("> ")
    session.type("Hi\r")
    session.wait_for("tick tick")
    session.process.send_signal(signal.SIGINT)
    session.wait_for("[stopped]")
    session.wait_for("> ")
    wait_until(lambda: engine.num_live == 0)
    session.type("more\r")
    session.wait_for("tick tick")
    session.process.send_signal(signal.SIGINT)
    session.wait_for("> ")
    # what was seen of the stopped answer is part of the conversation
    prompt = TOKENIZER.decode(engine.requests[1].prompt_token_ids)
    assert prompt.startswith("user:Hi;assistant:tick tick")
    assert prompt.endswith(";user:more;")
    session.type("/exit\r")
    assert session.process.wait(30) == 0


def test_interrupt_at_the_prompt_does_not_leave_and_end_of_input_does(start_engine, terminal):
    start_engine()
    session = terminal()
    session.wait_for("> ")
    session.interrupt_until("/reset starts over")
    session.wait_for("> ")
    session.type("\x04")
    assert session.process.wait(30) == 0


def test_chat_at_a_terminal_continues_after_the_engine_came_back(start_engine, terminal):
    first = start_engine(next_token=saying("one", then_eos=True))
    session = terminal()
    session.wait_for("> ")
    session.type("Hi\r")
    session.wait_for("one")
    session.wait_for("> ")
    first.stop()
    second = start_engine(next_token=saying("two", then_eos=True))
    session.type("again\r")
    session.wait_for("two")
    assert second.requests[0].prompt_token_ids == ids_of("user:Hi;assistant:one;user:again;")
