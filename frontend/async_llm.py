"""`AsyncLLM`: prompts in, streams of outputs out, on an engine in another process.

Owns the public asynchronous API. Text and tokens meet here; the wire is the session's business.
"""

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from frontend.beam_search import BeamSearchOutput, BeamSearchParams, beam_search_output
from frontend.engine_client import EngineClient
from frontend.live_request import LiveRequest, Turn
from frontend.outputs import RequestOutput
from frontend.prompts import PromptInput
from frontend.request_factory import ChatMessage
from frontend.sampling_params import SamplingParams


class AsyncLLM(EngineClient):
    """A client of one engine.

    ```python
    async with AsyncLLM() as llm:
        async for output in llm.generate("The capital of France is"):
            print(output.outputs[0].text)
    ```

    A stream goes on when the engine is lost and comes back, with the same model at the same
    address, within `reconnect_timeout_s`; otherwise it ends with EngineDied. Leaving a stream
    early aborts its request.

    Args:
        address: `ipc://PATH` or `tcp://HOST:PORT`; default: where `engine-core` listens unless
            told otherwise.
        client_name: for the engine's log.
        connect_timeout_s: for the engine to answer the greeting, which it does between two steps.
        reconnect_timeout_s: for a lost engine to come back.
        silence_timeout_s: an engine that says nothing for longer is taken for lost. It says
            nothing during a step; that its process or its machine died shows much sooner.
        seed: of the seeds drawn for requests that have none; default: unpredictable.
    """

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, as a stream that ends with the output whose `finished` is True.

        Outputs that the consumer is too slow for are merged.

        Args:
            sampling_params: default: the model's own.
            request_id: to know it by; default: a number. Free again when the request ends.
            priority: smaller is more urgent; 0 unless the engine's policy is priority.
            tenant: whose share of the engine it uses, under policy fair; default: this client's.
            cache_salt: only requests with the same salt share cached prompts.

        Raises:
            InvalidInput: the prompt or the parameters cannot be served, or `request_id` is live.
            QueueFull: as much waits as the engine allows; try again later.
            RequestRejected: the engine refused it for another reason.
            EngineDied: the engine was lost and did not come back.
        """
        await self.ready()
        request = self.factory.make(
            prompt,
            sampling_params,
            self.requests.free_id(request_id),
            turn=Turn(priority, tenant),
            cache_salt=cache_salt,
        )
        async with contextlib.aclosing(self._stream(request)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation: `generate` behind the model's chat template."""
        await self.ready()
        prompt = self.factory.chat_prompt(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_variables=chat_template_kwargs,
        )
        outputs = self.generate(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
        )
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    async def beam_search(
        self,
        prompt: PromptInput,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> BeamSearchOutput:
        """The likeliest continuations of one prompt, best first. Nothing comes before the end; if
        the engine is lost, the search starts again.

        Raises:
            InvalidInput, QueueFull, RequestRejected, EngineDied: see `generate`.
        """
        await self.ready()
        request = self.factory.make(
            prompt,
            params,
            self.requests.free_id(request_id),
            turn=Turn(priority, tenant),
            cache_salt=cache_salt,
        )
        async with contextlib.aclosing(self._stream(request)) as outputs:
            final = [output async for output in outputs][-1]
        return beam_search_output(final, self.factory.optional_tokenizer)

    async def _stream(self, request: LiveRequest) -> AsyncGenerator[RequestOutput, None]:
        try:
            self.send(request)
            finished = False
            while not finished:
                output = await request.next_output()
                finished = output.finished
                yield output
        finally:
            self.release(request)
