"""A server with OpenAI's and Ollama's streams, known delays and no model, on its own thread."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

PATHS = "/v1/completions", "/v1/chat/completions", "/api/generate", "/api/chat"
SSE = {"media_type": "text/event-stream"}


class FakeServer:
    """
    Args:
        first_s, gap_s: before the first token, and between two.
        fate: from a request's number to "cut" (the stream stops), "error" (it tells of one), a
            status, or None.
        stands_still: (from, until) seconds after the start, in which no request begins.
    """

    def __init__(self, first_s=0.02, gap_s=0.01, fate=lambda _number: None, stands_still=None):
        self.first_s, self.gap_s, self.fate = first_s, gap_s, fate
        self.stands_still = stands_still
        self.bodies, self.headers, self.paths, self.connections = [], [], set(), set()
        self.num_running = self.most_running = 0
        self.started_at = None

    @contextlib.contextmanager
    def serving(self):
        routes = [
            Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "fake"}]})),
            Route("/api/tags", lambda _: JSONResponse({"models": [{"name": "fake:latest"}]})),
            *(Route(path, self._answer, methods=["POST"]) for path in PATHS),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="critical")
        server = uvicorn.Server(config)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
            thread.start()
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            server.should_exit = True
            thread.join(10)

    async def _answer(self, request):
        now_s = time.monotonic()
        self.started_at = self.started_at or now_s
        number = len(self.bodies)
        body = json.loads(await request.body())
        self.bodies.append(body)
        self.headers.append(request.headers)
        self.connections.add(request.client)
        self.paths.add(request.url.path)
        fate = self.fate(number)
        if isinstance(fate, int):
            return JSONResponse({"error": {"message": "no"}}, fate)
        if self.stands_still:
            begin, end = self.stands_still
            if begin <= now_s - self.started_at < end:
                await asyncio.sleep(end - (now_s - self.started_at))
        is_ollama = request.url.path.startswith("/api")
        make = self._ollama if is_ollama else self._openai
        return StreamingResponse(self._counted(make(request.url.path, body, fate)), **SSE)

    async def _counted(self, parts):
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            async for part in parts:
                yield part
        finally:
            self.num_running -= 1

    async def _tokens(self, count, fate):
        """Positions, each at its time; None for what the fate puts there."""
        due = time.monotonic() + self.first_s
        for at in range(count):
            await asyncio.sleep(due - time.monotonic())
            if fate and at == count // 2:
                yield None
                return
            yield at
            due += self.gap_s

    async def _openai(self, path, body, fate):
        def event(choices, **more):
            return "data: " + json.dumps({"choices": choices, **more}) + "\n\n"

        count = body["max_tokens"]
        is_chat = "chat" in path
        if is_chat:  # as vLLM and OpenAI begin; no token is in it
            yield event([{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        async for at in self._tokens(count, fate):
            if at is None:
                if fate == "error":
                    yield "data: " + json.dumps({"error": {"message": "out of memory"}}) + "\n\n"
                return
            text = {"delta": {"content": " a"}} if is_chat else {"text": " a"}
            yield event([text | {"finish_reason": "length" if at == count - 1 else None}])
        prompt = body.get("prompt") or body["messages"]
        usage = {"prompt_tokens": num_words(prompt), "completion_tokens": count}
        yield event([], usage=usage | {"prompt_tokens_details": {"cached_tokens": 3}})
        yield "data: [DONE]\n\n"

    async def _ollama(self, path, body, fate):
        count = body["options"]["num_predict"]
        async for at in self._tokens(count, fate):
            if at is None:
                if fate == "error":
                    yield json.dumps({"error": "out of memory"}) + "\n"
                return
            said = {"message": {"content": " a"}} if "chat" in path else {"response": " a"}
            yield json.dumps({**said, "done": False}) + "\n"
        prompt = body.get("prompt") or body["messages"]
        counts = {"prompt_eval_count": num_words(prompt), "eval_count": count}
        yield json.dumps({"response": "", "done": True, **counts}) + "\n"


def num_words(prompt):
    if isinstance(prompt, str):
        return len(prompt.split())
    return sum(len(message["content"].split()) for message in prompt)
