"""Stands for `engine-core` where a server starts it. Run as a script by tests.

Usage: on_demand_engine.py FOLDER pull NAME --json, or FOLDER --model NAME [options]. NAME says how
it behaves; each start is a line of FOLDER/NAME: the process id.
"""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    folder, *arguments = sys.argv[1:]
    if arguments[0] == "show":
        facts = {"architecture": "FakeForCausalLM", "max_model_len": 512, "num_weights": 10**9,
                 "file_bytes": 7, "file_format": "gguf", "formats": "Q4_K", "tasks": ["generate"],
                 "chat_template": "<think></think>{{ tools }}<tool_call>", "takes_images": True,
                 "default_sampling": {"top_k": 7}}  # fmt: skip
        print(json.dumps({} if arguments[1] == "absent" else facts))
        return
    if arguments[0] == "pull":
        if arguments[1] == "absent":
            sys.exit("engine-core: 'absent' is no known name; see the list")
        for done in (1, 2):
            status = {"status": "pulling it", "completed": done * 10**6, "total": 2 * 10**6}
            print(json.dumps(status), flush=True)
        print(json.dumps({"status": "success", "path": "/x", "bytes": 2 * 10**6}))
        return
    name = arguments[arguments.index("--model") + 1]
    starts = Path(folder) / Path(name).name
    with starts.open("a") as file:
        file.write(f"{os.getpid()}\n")
    is_first = len(starts.read_text().split()) == 1
    if name in ("slow", "broken"):
        time.sleep(1.0)
    if name == "broken" and is_first:
        print("reading weights\nengine-core: the file is cut short", file=sys.stderr)
        sys.exit(3)
    if name == "large" and is_first:
        sys.exit("engine-core: there is not enough memory for the KV cache")
    serve(name if is_first else "", arguments[arguments.index("--bind") + 1])


def serve(kind: str, address: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from fake_engine import FakeEngine

    with FakeEngine(address, step_s=0.02) as engine:
        ready = {"event": "ready", "device": "cpu", "kv_cache_bytes": 10**15 * (kind == "hoarder")}
        print(json.dumps(ready), flush=True)
        if kind == "mortal":
            while engine.num_tokens < 5:
                time.sleep(0.01)
            print("illegal instruction, as it were", file=sys.stderr, flush=True)
            os._exit(7)
        sys.stdin.read()


if __name__ == "__main__":
    main()
