"""What tests/protocol/test_sandbox.py runs in a process of its own."""

import ctypes
import sys
import time

from protocol.sandbox import serve_sandbox


class Refusal(Exception):
    pass


def make(setup):
    def handle(request):
        match request:
            case b"refuse":
                raise Refusal("no: " + "é" * 10_000)
            case b"crash":
                ctypes.string_at(0)
            case b"loop":
                while True:
                    pass
            case b"memory":
                return bytes(10**10)
            case b"sleep":
                time.sleep(60)
            case b"defect":
                raise KeyError("a defect")
            case b"exit":
                sys.stdout.close()
        return setup + request

    return handle


serve_sandbox(make, refusal=Refusal)
