"""The other client: a process that streams one answer after the other, and chats beside it. It
writes a line of JSON for each: when it began, how long it took, its largest gap, its text."""

import http.client
import json
import sys
import threading
import time
from urllib.parse import urlsplit

STREAM = {"prompt": "Once upon a time", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0}
_CHAT_EVERY_S = 0.5
_WAIT_S = 120.0
_output = threading.Lock()


def _post(
    address: str, path: str, body: dict
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(address, timeout=_WAIT_S)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return connection, connection.getresponse()


def _stream(address: str) -> dict:
    """The gaps begin with the first token: what is before it waits for its place as all do."""
    began_s = last_s = time.monotonic()
    texts, gap_s, gap_at_s = [], 0.0, began_s
    connection, answer = _post(address, "/v1/completions", {**STREAM, "stream": True})
    for line in answer:
        now_s = time.monotonic()
        if line.startswith(b"data: {"):
            texts.append(json.loads(line[6:])["choices"][0]["text"])
            if len(texts) > 1 and now_s - last_s > gap_s:
                gap_s, gap_at_s = now_s - last_s, now_s
            last_s = now_s
    connection.close()
    return {"status": answer.status, "gap_s": gap_s, "at_s": gap_at_s, "text": "".join(texts)}


def _chat(address: str) -> dict:
    began_s = time.monotonic()
    connection, answer = _post(address, "/v1/chat/completions", CHAT)
    text = answer.read().decode()
    connection.close()
    now_s = time.monotonic()
    if answer.status == 200:
        text = json.loads(text)["choices"][0]["message"]["content"]
    return {"status": answer.status, "gap_s": now_s - began_s, "at_s": now_s, "text": text}


def _repeat(kind: str, ask, address: str, pause_s: float) -> None:
    while True:
        try:
            said = ask(address)
        except Exception as error:
            said = {"status": 0, "gap_s": 0.0, "at_s": time.monotonic(), "text": repr(error)}
        with _output:
            print(json.dumps({"kind": kind, **said}), flush=True)
        time.sleep(pause_s)


def main() -> None:
    address = urlsplit(sys.argv[1]).netloc
    threading.Thread(
        target=_repeat, args=("chat", _chat, address, _CHAT_EVERY_S), daemon=True
    ).start()
    _repeat("stream", _stream, address, 0.0)


if __name__ == "__main__":
    main()
