"""A hub of this machine that speaks the Hugging Face hub's API, with the faults of real ones. Not a
test. Large files are at a CDN, which is another server; every file is offered by Xet, too."""

import contextlib
import hashlib
import http.server
import json
import threading
from collections import defaultdict
from urllib.parse import unquote

COMMIT = "a" * 40
LARGE = (".gguf", ".safetensors")


class LocalHub:
    """
    Attributes:
        repos: bytes of each file by name, by repository.
        faults: by the end of a path, what happens to its next requests: a status, "cut" (the
            connection ends behind half of it), "hang" (no byte behind half of it), or bytes that
            are sent in its place; None: nothing.
        asked: every request: method, path, range, authorization.
    """

    def __init__(self, repos):
        self.repos = repos
        self.faults = defaultdict(list)
        self.asked = []
        self.released = threading.Event()

    def gets_of(self, name):
        return [each for each in self.asked if each[0] == "GET" and each[1].endswith(name)]

    @contextlib.contextmanager
    def serving(self):
        with _server(self, _Hub) as hub, _server(self, _Cdn) as cdn:
            self.url = f"http://127.0.0.1:{hub.server_port}"
            self.cdn_url = f"http://localhost:{cdn.server_port}"
            yield self
            self.released.set()


@contextlib.contextmanager
def _server(hub, handler):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.hub = hub
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub = self.server.hub
        path = unquote(self.path.partition("?")[0])
        asked = self.headers.get("range"), self.headers.get("authorization")
        hub.asked.append((self.command, path, *asked))
        fault = None
        for end, faults in hub.faults.items():
            if path.endswith(end) and faults and self.applies(path):
                fault = faults.pop(0)
        if isinstance(fault, int):
            return self.say(fault, b"{}", {"retry-after": "0"})
        return self.answer(hub, path, fault)

    def applies(self, path):
        return True

    def say_file(self, data, fault, headers):
        if isinstance(fault, bytes):
            data = fault
        start = int((self.headers.get("range") or "bytes=0-").split("=")[1].split("-")[0])
        if start:
            headers = {**headers, "content-range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        self.say(206 if start else 200, data[start:], headers, fault)

    def say(self, status, data, headers=(), fault=None):
        self.send_response(status)
        for name, value in {"content-length": len(data), **dict(headers)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data if fault not in ("cut", "hang") else data[: len(data) // 2 + 1])
            self.wfile.flush()
        if fault == "hang":
            self.server.hub.released.wait(60)
        self.close_connection = fault in ("cut", "hang")

    def log_message(self, *_arguments):
        pass


class _Cdn(_Handler):
    """/REPO/NAME, of large files and of anybody who has the address."""

    def answer(self, hub, path, fault):
        repo, _, name = path[1:].partition("/raw/")
        data = hub.repos[repo][name]
        self.say_file(data, fault, {"etag": f'"{hashlib.md5(data).hexdigest()}"'})


class _Hub(_Handler):
    def applies(self, path):
        return path.startswith("/api") or not path.endswith(LARGE)

    def answer(self, hub, path, fault):
        repo = next((each for each in hub.repos if f"/{each}/" in f"{path}/"), None)
        if repo is None:
            refusals = {"/gated": (403, "GatedRepo"), "/private": (401, "RepoNotFound")}
            found = (refusals[each] for each in refusals if each in path)
            status, code = next(found, (404, "RepoNotFound"))
            return self.say(status, b"{}", {"x-error-code": code})
        files = hub.repos[repo]
        if "/revision/" in path and not path.endswith(("/main", COMMIT)):
            return self.say(404, b"{}", {"x-error-code": "RevisionNotFound"})
        if path.startswith("/api/models/") and "/tree/" in path:
            listed = [
                {"type": "file", "path": name, "size": len(data), **_described(name, data)}
                for name, data in files.items()
            ]
            return self.say(200, json.dumps(listed).encode())
        if path.startswith("/api/models/"):
            siblings = [
                {"rfilename": name, "size": len(data), **_described(name, data)}
                for name, data in files.items()
            ]
            info = {"id": repo, "sha": COMMIT, "siblings": siblings}
            return self.say(200, json.dumps(info).encode())
        name = path.partition("/resolve/")[2].partition("/")[2]
        if name not in files:
            return self.say(404, b"{}", {"x-error-code": "EntryNotFound"})
        data, headers = files[name], {"x-repo-commit": COMMIT, "accept-ranges": "bytes"}
        if not name.endswith(LARGE):
            etag = _described(name, data)["oid"]
            return self.say_file(data, fault, {**headers, "etag": f'"{etag}"'})
        digest = hashlib.sha256(data).hexdigest()
        return self.say(
            302,
            b"",
            {
                **headers,
                "location": f"{hub.cdn_url}/{repo}/raw/{name}",
                "x-linked-size": len(data),
                "x-linked-etag": f'"{digest}"',
                "x-xet-hash": digest,
                "link": f'<{hub.url}/api/models/{repo}/xet-read-token/{COMMIT}>; rel="xet-auth"',
            },
        )


def _described(name, data):
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    if not name.endswith(LARGE):
        return {"oid": oid, "blobId": oid}
    digest = hashlib.sha256(data).hexdigest()
    lfs = {"sha256": digest, "oid": digest, "size": len(data), "pointerSize": 134}
    return {"oid": oid, "blobId": oid, "lfs": lfs}
