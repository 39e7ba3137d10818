"""A process that behaves as the daemon does towards its parent. Run as a script by tests.

Usage: child_engine.py MODE [daemon arguments]; MODE says how it misbehaves.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeEngine


def main() -> None:
    mode, arguments = sys.argv[1], sys.argv[2:]
    address = arguments[arguments.index("--bind") + 1]
    print("loading", arguments, file=sys.stderr, flush=True)
    if mode == "fail":
        print("cannot find the model", file=sys.stderr)
        sys.exit(3)
    if mode == "babble":
        print("hello, I am no engine", flush=True)
    if mode == "hang":
        time.sleep(60)
    with FakeEngine(address) as engine:
        print(json.dumps({"event": "ready", "address": address}), flush=True)
        if mode == "die":
            while engine.num_tokens < 10:
                time.sleep(0.01)
            print("segmentation fault, as it were", file=sys.stderr, flush=True)
            sys.exit(7)
        if mode == "noisy":
            for _ in range(20_000):
                print("x" * 100, file=sys.stderr)
                print("y" * 100)
            sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
