"""`AsyncLLM`: prompts in, streams of outputs out, on an engine in another process."""

import contextlib
import functools
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Unpack

from frontend.event_loop import Pause
from frontend.inputs.prompts import ChatMessage, PromptInput, TokensPrompt, chars_of, has_data
from frontend.multimodal.media import has_media, in_thread
from frontend.outputs import BeamSearchOutput, RequestOutput, beam_search_output, best_of
from frontend.pooling import PoolingCalls
from frontend.request_options import RequestOptions, adapter_of
from frontend.request_state import RequestState
from frontend.sampling_params import BeamSearchParams, SamplingParams
from frontend.shared_threads import OWN_TEMPLATES, REQUEST_TEMPLATES
from frontend.text.long_texts import LONG_CHARS, read_texts


class AsyncLLM(PoolingCalls):
    """A client of one engine, or of several that serve one model.

    ```python
    async with AsyncLLM() as llm:
        async for output in llm.generate("The capital of France is"):
            print(output.outputs[0].text)
    ```

    A stream continues when the engine is lost and comes back, with the same model at the same
    address, within `reconnect_timeout_s`; otherwise it ends with EngineDied. Leaving a stream early
    aborts its request. Raises InvalidInput: an option that is not one of a client, an address of
    neither kind, or a key that cannot be read.

    With several addresses a request goes to the engine with most of its prompt's prefix and the
    least to do; a stream whose engine is lost continues at another one of equal weights, dtype and
    instruction set, or waits for its own. Calls such as `statistics` are made on one of `engines`.

    Args:
        address: `ipc://PATH` or `tcp://HOST:PORT`, or several of them; default: the default address
            of `engine-core`.
        client_name: for the engine's log.
        connect_timeout_s: for the engine to answer HELLO, which it does between two steps.
        reconnect_timeout_s: for a lost engine to come back.
        silence_timeout_s: an engine that sends nothing for longer is considered lost. It sends
            nothing during a step; the end of its process or machine is noticed much sooner.
        seed: of the seeds drawn for requests that have none; default: unpredictable.
        keys: the file made by `engine-core keys add`, for an engine that listens on TCP with keys.
        structured_outputs_config: vLLM's, see docs/guides/structured_output.md.
        allowed_local_media_path: a folder; prompts may name files below it as images and sounds.
        allow_media_url: hosts; prompts may have images and sounds by http(s) URLs of these; see
            docs/guides/multimodal.md.
        routing_policy: of several engines, which one gets a request; see docs/guides/router.md.
        engine_options: none; `launch` takes them.
    """

    def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        session_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, as a stream that ends with the output whose `finished` is True.

        A slow consumer gets several outputs merged into one.

        Args:
            sampling_params: default: the model's own.
            request_id: default: a number. Free again when the request ends.
            priority: smaller is more urgent: of all requests under policy priority, of a tenant's
                under fair; 0 under fcfs.
            tenant: whose share of the engine it uses, under policy fair; default: this client's.
                What stands behind a slash divides the share: "lab/ann", "lab/bob".
            cache_salt: only requests with the same salt share cached prompts.
            timeout_s: seconds, from this call on and also across a loss of the engine, after which
                it ends with what it has and finish reason "timeout".
            adapter: the name of one of the engine's adapters; `lora_request`: vLLM's way to say it,
                which also loads one that the engine does not know.
            session_id: requests with the same one are best served by the same one of several
                engines; see docs/guides/router.md.

        Raises:
            InvalidInput: the prompt or the parameters cannot be served, or `request_id` is in use.
            QueueFull: the engine's queue is full; try again later.
            RequestRejected: the engine refused it for another reason.
            EngineDied: the engine was lost and did not come back.
        """
        return self._stream(prompt, sampling_params, request_id, options, session_id)

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
        session_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation: `generate` behind the model's chat template.
        Raises InvalidInput, QueueFull, RequestRejected, EngineDied: see `generate`; also a template
        that fails, or passes its limits of time and memory."""
        prompt = await self.chat_prompt(
            messages,
            is_cut=_is_cut(sampling_params),
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
        stream = self._stream(prompt, sampling_params, request_id, options, session_id)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                yield output

    async def chat_prompt(
        self, messages: Sequence[ChatMessage], **template_options: Any
    ) -> TokensPrompt:
        """The prompt of a conversation: see `InputProcessor.chat_prompt`."""
        await self.ready()
        make, processor = functools.partial, self.input_processor
        template = template_options.get("chat_template")
        is_own = isinstance(template, str | None) and processor.tokenizer.is_own(template)
        threads = OWN_TEMPLATES if is_own else REQUEST_TEMPLATES
        if not has_media(messages):
            return await threads.run(make(processor.chat_prompt, messages, **template_options))
        text, items = await threads.run(make(processor.chat_text, messages, **template_options))
        return await in_thread(make(processor.chat_tokens, text, items), decodes=True)

    async def with_media(self, prompt: object) -> object:
        """See `InputProcessor.with_media`."""
        is_long = chars_of(prompt) > LONG_CHARS and self.input_processor.encoder_prompts is not None
        if not (has_data(prompt) or is_long):
            return prompt
        await self.ready()
        call = functools.partial(self.input_processor.with_media, prompt)
        return await in_thread(call, decodes=True)

    async def tokenized(self, prompts: Sequence[object], **options: Any) -> list[object]:
        """Prompts of which those that are texts have their tokens, too, without stopping what else
        runs on this event loop. Options: see `InputProcessor.encode`."""
        await self.ready()
        found, pause, one = list[object](), Pause(), len(prompts) == 1
        for index, prompt in enumerate(prompts):
            name = "prompt" if one else f"prompt {index}"
            read = functools.partial(self.input_processor.tokenized, prompt, name, **options)
            found.append(await read_texts(read, chars_of(prompt)))
            await pause.between()
        return found

    async def beam_search(
        self,
        prompt: PromptInput,
        params: BeamSearchParams,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> BeamSearchOutput:
        """The likeliest continuations of one prompt, best first. Nothing comes before the end; if
        the engine is lost, the search starts again.
        Raises InvalidInput, QueueFull, RequestRejected, EngineDied: see `generate`."""
        stream = self._stream(prompt, params, request_id, options)
        async with contextlib.aclosing(stream) as outputs:
            final = [output async for output in outputs][-1]
        return beam_search_output(final, self.input_processor.optional_tokenizer)

    async def _stream(
        self,
        prompt: object,
        params: SamplingParams | BeamSearchParams | None,
        request_id: str | None,
        options: RequestOptions,
        session_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        await self.ready()
        await self.know_adapter(adapter_of(options))
        request = await self.make_request(prompt, params, request_id, **options)
        request.session_id = session_id
        try:
            self.session.submit(request)
            finished = False
            while not finished:
                output = await request.next_output()
                finished = output.finished
                yield best_of(output, params) if isinstance(params, SamplingParams) else output
        finally:
            self.session.release(request)

    async def make_request(
        self,
        prompt: object,
        params: SamplingParams | BeamSearchParams | None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestState:
        """The request that `generate` would send. Raises InvalidInput: see there."""
        prompt = await self.with_media(prompt)
        if chars_of(prompt) > LONG_CHARS and self.input_processor.encoder_prompts is None:
            (prompt,) = await self.tokenized([prompt], is_cut=_is_cut(params))
        new_id = self.session.requests.new_request_id(request_id)
        return self.input_processor.make_request(prompt, params, new_id, **options)

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests: their streams get a last output with finish reason "abort". Unknown ids
        are ignored, as their requests may just have ended."""
        for each in (request_id,) if isinstance(request_id, str) else tuple(request_id):
            request = self.session.requests.get(each)
            if request is not None:
                request.finish("abort")
                self.session.release(request)


def _is_cut(params: SamplingParams | BeamSearchParams | None) -> bool:
    return isinstance(params, SamplingParams) and params.truncate_prompt_tokens is not None
