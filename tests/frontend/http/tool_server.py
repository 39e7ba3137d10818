"""A server of tools over stdio that does what its tools are named after; it starts in no time."""

import base64
import json
import os
import subprocess
import sys
import time

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS = {
    "echo": "Says it again.\nA second line.",
    "add-tool": "Makes one more tool.",
    "die": "Ends the server.",
    "hang": "Never answers.",
    "fail": "Answers with an error.",
    "long": "Says very much.",
    "picture": "Shows a picture.",
    "processes": "Numbers of this process and of one that it starts.",
    "environment": "The variables of the environment.",
}
RED = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


def send(**message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def content(name, arguments):
    if name == "die":
        sys.exit("it was told to")
    if name == "hang":
        time.sleep(60)
    if name == "picture":
        data = base64.b64encode(RED).decode()
        return [
            {"type": "text", "text": "Here it is."},
            {"type": "image", "data": data, "mimeType": "image/png"},
        ]
    if name == "add-tool":
        TOOLS["another"] = "Was not there."
        send(method="notifications/tools/list_changed")
    text = arguments.get("text", "")
    if name == "long":
        text = "x" * 100_000
    if name == "processes":
        text = f"{os.getpid()} {subprocess.Popen(['sleep', '60']).pid}"
    if name == "environment":
        text = json.dumps(dict(os.environ))
    return [{"type": "text", "text": text}]


def answer(method, params):
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {"listChanged": True}},
            "serverInfo": {"name": "own", "version": "1"},
        }
    if method == "tools/list":
        tools = [
            {"name": name, "description": text, "inputSchema": TEXT} for name, text in TOOLS.items()
        ]
        first = "cursor" not in (params or {})
        return {"tools": tools[:4], "nextCursor": "4"} if first else {"tools": tools[4:]}
    name = params["name"]
    return {"content": content(name, params["arguments"]), "isError": name == "fail"}


def main():
    print("no message")
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        if message["method"] in ("initialize", "tools/list", "tools/call"):
            send(id=message["id"], result=answer(message["method"], message.get("params")))
        else:
            send(id=message["id"], error={"code": -32601, "message": "no such method"})


if __name__ == "__main__":
    main()
