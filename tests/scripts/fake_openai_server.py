"""An OpenAI-compatible server of completions: one token an event. No model.

    python fake_openai_server.py PORT [--die-after N | --short | --text-only]

`--die-after N`: the process ends in its N-th completion. `--short`: one token less than asked for.
`--no-usage`: the server does not count.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OPTIONS = sys.argv[2:]
served = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/health":
            self.answer(200, b"")
        elif self.path == "/v1/models":
            self.answer(200, json.dumps({"data": [{"id": "fake"}]}).encode())
        else:
            self.answer(404, b"")

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        global served
        served += 1
        if "--die-after" in OPTIONS and served > int(OPTIONS[-1]):
            print("I give up", file=sys.stderr, flush=True)
            os._exit(3)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "fake" and asked["stream"] and asked["ignore_eos"]
        if len(asked["prompt"]) > 100:
            self.answer(400, b'{"error": "prompt too long"}')
            return
        number = asked["max_tokens"] - ("--short" in OPTIONS)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for at in range(number):
            # the first token's text is held back; the last comes with its reason
            reason = "length" if at == number - 1 else None
            self.event({"choices": [{"text": "a" if at else "", "finish_reason": reason}]})
            time.sleep(0.01)
        if "--no-usage" not in OPTIONS:
            self.event({"choices": [], "usage": {"completion_tokens": number}})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")
        self.close_connection = True

    def event(self, document):
        data = b"data: " + json.dumps(document).encode() + b"\n\n"
        middle = len(data) // 2  # an event need not be a chunk
        self.chunk(data[:middle])
        self.chunk(data[middle:])

    def chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
server.daemon_threads = True
server.serve_forever()
