"""Vectors, classes and scores of prompts, by vLLM's names: what is asked and what comes back, as
plain lists. `PoolingCalls` are the calls of `AsyncLLM`; those of `LLM` stand on them."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from operator import mul
from typing import Any, Unpack

import msgspec

from frontend.engine_client import EngineClient
from frontend.errors import InvalidInput, RequestFailed
from frontend.event_loop import Pause
from frontend.inputs.prompts import PromptsInput, chars_of, split_prompts
from frontend.outputs import RequestOutput
from frontend.pooling_params import PoolingParamsInput, each_of
from frontend.request_options import RequestOptions, adapter_of
from frontend.request_state import RequestState
from frontend.text.long_texts import read_texts
from protocol.pooling import PoolingTask


class PoolingOutput(msgspec.Struct):
    """`data`: a vector, or a list of them, one a token; of BGE-M3's weights, a number a token."""

    data: list[Any]


class EmbeddingOutput(msgspec.Struct):
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


class ClassificationOutput(msgspec.Struct):
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ScoringOutput(msgspec.Struct):
    score: float


class PoolingRequestOutput(msgspec.Struct):
    """The result of one prompt."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput):
    outputs: EmbeddingOutput


class ClassificationRequestOutput(PoolingRequestOutput):
    outputs: ClassificationOutput


class ScoringRequestOutput(PoolingRequestOutput):
    outputs: ScoringOutput


class PoolingCalls(EngineClient):
    """
    Raises:
        InvalidInput: a prompt or parameter that cannot be served, or a task that the model does not
            have; nothing was sent.
        RequestRejected, RequestFailed: the engine refused or could not finish one; the others of
            the call are aborted.
        EngineDied: the engine was lost and did not come back.
    """

    async def embed(
        self,
        prompts: PromptsInput,
        pooling_params: PoolingParamsInput = None,
        *,
        prompt_name: str | None = None,
        **more: Any,
    ) -> list[EmbeddingRequestOutput]:
        """A vector each. `prompt_name`: of one of the model's (`model.prompts`), to go before each
        text; default: the model's own, if it names one. `more`: see `pool`."""
        each_prompt = split_prompts(prompts)
        await self.ready()
        each_prompt = [self.with_prompt(each, prompt_name) for each in each_prompt]
        found = await self.pool(each_prompt, pooling_params, PoolingTask.EMBED, **more)
        return [
            _answer(EmbeddingRequestOutput, each, EmbeddingOutput(_rows(each)[0])) for each in found
        ]

    async def classify(
        self, prompts: PromptsInput, pooling_params: PoolingParamsInput = None, **more: Any
    ) -> list[ClassificationRequestOutput]:
        """Probabilities of the labels. `more`: see `pool`."""
        found = await self.pool(
            split_prompts(prompts), pooling_params, PoolingTask.CLASSIFY, **more
        )
        return [
            _answer(ClassificationRequestOutput, each, ClassificationOutput(_rows(each)[0]))
            for each in found
        ]

    async def reward(
        self, prompts: PromptsInput, pooling_params: PoolingParamsInput = None, **more: Any
    ) -> list[PoolingRequestOutput]:
        """The labels of each token, or of each step. `more`: see `pool`."""
        return await self.encode(prompts, pooling_params, pooling_task="token_classify", **more)

    async def encode(
        self,
        prompts: PromptsInput,
        pooling_params: PoolingParamsInput = None,
        *,
        pooling_task: str | None = None,
        **more: Any,
    ) -> list[PoolingRequestOutput]:
        """`pooling_task`: a `PoolingTask`; default: that of the parameters, else the model's first.
        `more`: see `pool`."""
        each_prompt = split_prompts(prompts)
        await self.ready()
        own_task = next((each.task for each in each_of(pooling_params, len(each_prompt))), None)
        task = self.pooling_task(pooling_task or own_task)
        found = await self.pool(each_prompt, pooling_params, task, **more)
        outputs = []
        for each in found:
            rows = _rows(each)
            has_rows = each.pooled is not None and len(each.pooled.shape) > 1
            data: list[Any] = rows if has_rows else rows[0]
            outputs.append(_answer(PoolingRequestOutput, each, PoolingOutput(data)))
        return outputs

    async def score(
        self,
        data_1: Sequence[str],
        data_2: Sequence[str],
        pooling_params: PoolingParamsInput = None,
        **more: Any,
    ) -> list[ScoringRequestOutput]:
        """Of each text of `data_2` with that of `data_1`, or with its only one: by a model with one
        label both as one prompt, by one for vectors the cosine of both. `more`: see `pool`."""
        await self.ready()
        if not data_1 or len(data_1) not in (1, len(data_2)):
            raise InvalidInput(
                f"data_1 has {len(data_1)} texts and data_2 {len(data_2)}; give one, or as many"
            )
        if PoolingTask.SCORE in self.input_processor.model.tasks:
            firsts = list(data_1) * (len(data_2) if len(data_1) == 1 else 1)
            pairs = list(zip(firsts, data_2, strict=True))
            found = await self.pool(pairs, pooling_params, PoolingTask.SCORE, **more)
            return [
                _answer(ScoringRequestOutput, each, ScoringOutput(_rows(each)[0][0]))
                for each in found
            ]
        texts = [self.with_prompt(each, None) for each in (*data_1, *data_2)]
        found = await self.pool(texts, pooling_params, PoolingTask.EMBED, **more)
        firsts_found, seconds = found[: len(data_1)], found[len(data_1) :]
        outputs = []
        for index, second in enumerate(seconds):
            first = firsts_found[index if len(firsts_found) > 1 else 0]
            output = _answer(
                ScoringRequestOutput,
                second,
                ScoringOutput(_cosine(_rows(first)[0], _rows(second)[0])),
            )
            if first is not firsts_found[0] or not index:  # a text that all share counts once
                output.prompt_token_ids = [*first.prompt_token_ids, *second.prompt_token_ids]
            outputs.append(output)
        return outputs

    async def pool(
        self,
        prompts: Sequence[object],
        pooling_params: PoolingParamsInput,
        task: PoolingTask,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        on_finished: Callable[[], None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Prompts or pairs of texts; all are checked before any is sent, and outputs are in their
        order. Arguments: see `AsyncLLM.generate`; of several prompts each one's id has its place
        behind `request_id`."""
        await self.ready()
        await self.know_adapter(adapter_of(options))
        each_params = each_of(pooling_params, len(prompts))
        process = self.input_processor
        process.check_task(task)
        one = len(prompts) == 1
        requests, pause = [], Pause()
        for index, (prompt, params) in enumerate(zip(prompts, each_params, strict=True)):
            name = "prompt" if one else f"prompt {index}"
            read = functools.partial(
                process.pooled_prompt, prompt, params, name, add_special_tokens=add_special_tokens
            )
            pooled = await read_texts(read, chars_of(prompt))
            own_id = request_id if request_id is None or one else f"{request_id}-{index}"
            requests.append(
                process.make_pooling_request(
                    pooled,
                    params,
                    task,
                    self.session.requests.new_request_id(own_id),
                    name=name,
                    on_finished=on_finished,
                    **options,
                )
            )
            await pause.between()
        return await self.run_all(requests, _pooled)

    def pooling_task(self, named: str | None) -> PoolingTask:
        """None: the model's first. Raises InvalidInput: there is no such task."""
        own = [each for each in self.input_processor.model.tasks if each != "generate"]
        named = named or next(iter(own), PoolingTask.EMBED)
        if named not in tuple(PoolingTask):
            known = ", ".join(PoolingTask)
            raise InvalidInput(f"the task is {named!r}, there is {known}; use one of these")
        return PoolingTask(named)

    def with_prompt(self, prompt: object, name: str | None) -> object:
        """A text behind the model's prompt of this name, or behind its default one.
        Raises InvalidInput: there is none of this name, or these are token ids."""
        model, is_asked = self.input_processor.model, name is not None
        if name is None and (name := model.default_prompt_name) is None:
            return prompt
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        is_text = isinstance(text, str) and not (
            isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is not None
        )
        if not (is_text or is_asked):
            return prompt
        if name not in model.prompts:
            known = ", ".join(model.prompts) or "none"
            raise InvalidInput(f"prompt_name is {name!r}, this model has {known}; omit it")
        if not is_text:
            raise InvalidInput(f"prompt_name is {name!r} for token ids; put its tokens before them")
        text = f"{model.prompts[name]}{text}"
        return {**prompt, "prompt": text} if isinstance(prompt, Mapping) else text


async def _pooled(request: RequestState) -> RequestOutput:
    output = await request.next_output()
    if output.pooled is None:
        ended = output.outputs[0]
        why = f": {ended.detail}" if ended.detail else ""
        raise RequestFailed(
            f"request {output.request_id} ended with reason {ended.finish_reason}{why}",
            reason=ended.finish_reason or "error",
        )
    return output


def _answer(kind: Any, output: RequestOutput, outputs: Any) -> Any:
    return kind(
        request_id=output.request_id,
        outputs=outputs,
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens or 0,
    )


def _rows(output: RequestOutput) -> list[list[float]]:
    assert output.pooled is not None
    return output.pooled.rows()


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    norms = math.sqrt(sum(map(mul, first, first)) * sum(map(mul, second, second)))
    return sum(map(mul, first, second)) / norms if norms else 0.0
