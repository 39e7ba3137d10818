"""Streams over HTTP, and how each ended. Not a test."""

import asyncio
import dataclasses

import httpx
import msgspec

DONE, BROKEN = "done", "broken"


@dataclasses.dataclass
class Ended:
    how: str
    text: str
    error: str = ""


async def stream(client, url, model, prompt, max_tokens, progress=lambda: None):
    """A completion's text, to its end: greedy, of that many tokens."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    pieces = []
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                return Ended(str(response.status_code), "", (await response.aread()).decode())
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return Ended(DONE, "".join(pieces))
                if line.startswith("data: "):
                    event = msgspec.json.decode(data)
                    if "error" in event:
                        return Ended("error", "".join(pieces), data)
                    pieces.append(event["choices"][0]["text"])
                    progress()
    except httpx.HTTPError as error:
        return Ended(BROKEN, "".join(pieces), repr(error))
    return Ended(BROKEN, "".join(pieces), "the stream ended without [DONE]")


async def streams(url, model, prompts, max_tokens, progress=lambda: None):
    """All at once; a stream that hangs fails the test by the client's time limit."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        return await asyncio.gather(
            *(stream(client, url, model, each, max_tokens, progress) for each in prompts)
        )
