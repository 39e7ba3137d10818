"""A server with OpenAI's and Ollama's streams, known delays and no model: on a thread, or as a
program: `python fake_servers.py PORT [FATE]`."""

import contextlib
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NAMES = {
    "/v1/models": {"data": [{"id": "fake"}]},
    "/api/tags": {"models": [{"name": "fake:latest"}]},
}


class FakeServer(ThreadingHTTPServer):
    """
    Args:
        first_s, gap_s: before the first token, and between two.
        fate: from a request's number to "cut" (the stream stops), "error" (it tells of one),
            "short" (a token less than asked for), "uncounted" (without usage), "die", a status, or
            None.
        stands_still: (from, until) seconds after the start, in which no request begins.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, first_s=0.02, gap_s=0.01, fate=lambda _number: None, stands_still=None, port=0
    ):
        super().__init__(("127.0.0.1", port), _Handler)
        self.first_s, self.gap_s, self.fate = first_s, gap_s, fate
        self.stands_still = stands_still
        self.bodies, self.headers, self.paths, self.connections = [], [], set(), set()
        self.num_running = self.most_running = 0
        self.started_at = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def serving(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{self.server_port}"
        self.shutdown()
        self.server_close()

    def note(self, handler):
        """The request's body, and what becomes of it."""
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.started_at = self.started_at or time.monotonic()
            fate = self.fate(len(self.bodies))
            self.bodies.append(body)
            self.headers.append(handler.headers)
            self.connections.add(handler.client_address)
            self.paths.add(handler.path)
        return body, fate

    def wait(self):
        if self.stands_still:
            begin, end = self.stands_still
            now_s = time.monotonic() - self.started_at
            if begin <= now_s < end:
                time.sleep(end - now_s)

    @contextlib.contextmanager
    def running(self):
        with self._lock:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        yield
        with self._lock:
            self.num_running -= 1

    def tokens(self, count, fate):
        """Positions, each at its time; None for what the fate puts there."""
        due = time.monotonic() + self.first_s
        for at in range(count):
            time.sleep(max(0.0, due - time.monotonic()))
            if fate in ("cut", "error") and at == count // 2:
                yield None
                return
            yield at
            due += self.gap_s


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._answer(200 if self.path in NAMES else 404, NAMES.get(self.path))

    def _answer(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        body, fate = self.server.note(self)
        if isinstance(fate, int):
            return self._answer(fate, {"error": {"message": "no"}})
        if fate == "die":
            os._exit(3)
        self.server.wait()
        with self.server.running():
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            make = self._ollama if self.path.startswith("/api") else self._openai
            for event in make(body, fate):
                middle = len(event) // 2  # an event need not be a chunk
                self._chunk(event[:middle])
                self._chunk(event[middle:])
        return self._chunk("")

    def _chunk(self, text):
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def _openai(self, body, fate):
        def event(choices, **more):
            return "data: " + json.dumps({"choices": choices, **more}) + "\n\n"

        count = body["max_tokens"] - (fate == "short")
        is_chat = "chat" in self.path
        if is_chat:  # as vLLM and OpenAI begin; no token is in it
            yield event([{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        for at in self.server.tokens(count, fate):
            if at is None:
                if fate == "error":
                    yield event([], error={"message": "out of memory"})
                return
            said = " a" if at else ""  # the first token's text is held back
            text = {"delta": {"content": said}} if is_chat else {"text": said}
            yield event([text | {"finish_reason": "length" if at == count - 1 else None}])
        usage = {"prompt_tokens": num_words(body), "completion_tokens": count}
        if fate != "uncounted":
            yield event([], usage=usage | {"prompt_tokens_details": {"cached_tokens": 3}})
        yield "data: [DONE]\n\n"

    def _ollama(self, body, fate):
        count = body["options"]["num_predict"]
        for _ in self.server.tokens(count, fate):
            said = {"message": {"content": " a"}} if "chat" in self.path else {"response": " a"}
            yield json.dumps({**said, "done": False}) + "\n"
        counts = {"prompt_eval_count": num_words(body), "eval_count": count}
        yield json.dumps({"response": "", "done": True, **counts}) + "\n"


def num_words(body):
    prompt = body.get("prompt") or body["messages"]
    if isinstance(prompt, str):
        return len(prompt.split())
    return sum(isinstance(one, int) or len(one["content"].split()) for one in prompt)


if __name__ == "__main__":
    port, *fates = sys.argv[1:]
    FakeServer(port=int(port), fate=lambda _number: "".join(fates)).serve_forever()
