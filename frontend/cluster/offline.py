"""Batches on Ray Data: an engine in each actor of a pool, rows in, rows with answers out."""

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, Dataset

from frontend.async_llm import AsyncLLM
from frontend.batch.answerer import Lines, OnAnswer
from frontend.batch.lines import BatchAnswer
from frontend.cluster.answering import answering, launch, names_of
from frontend.engine.engine_options import daemon_arguments
from frontend.errors import EngineClientError, EngineDied, EngineUnavailable, InvalidInput
from frontend.event_loop import LoopThread
from frontend.inputs.prompts import PromptInput
from frontend.outputs import RequestOutput
from frontend.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LINES_AT_ONCE = 32
"""Rows of one of Ray's tasks: what a lost actor has to do again, at most, of each of its calls."""
_CALLS_AT_ONCE = 8
"""Of an actor, so that its engine has rows when those of one call come to their end."""
ERROR_COLUMN = "__inference_error__"
"""The column of errors, named as ray.data.llm's."""


class _EngineActor:
    """An engine that lives and ends with one of Ray's actors.

    Args:
        engine_options: of the daemon's command line.
    """

    def __init__(self, model: str, engine_options: Sequence[str]) -> None:
        self._model = model
        self._thread = LoopThread("engine")
        self._llm: AsyncLLM = self._thread.run_and_wait(launch(model, engine_options))
        self._stack = contextlib.AsyncExitStack()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """An engine that is gone for good takes the actor with it: Ray starts another one, which
        gets its rows."""
        try:
            return self._thread.run_and_wait(coroutine)
        except (EngineUnavailable, EngineDied):
            logger.exception("the engine is gone; this actor ends")
            os._exit(1)


class LineActor(_EngineActor):
    """Batches with columns `number` and `line` (bytes) to batches with `answer`, for `map_batches`:
    lines of a batch file, and their answers.

    Args:
        names: that lines may give as `model`; default: the model's.
    """

    def __init__(
        self, model: str, engine_options: Sequence[str] = (), names: Sequence[str] = ()
    ) -> None:
        super().__init__(model, engine_options)
        context = answering(self._llm, names or names_of(model, self._llm))
        self._answerer = self._run(self._stack.enter_async_context(context))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[bytes]]:
        lines = list(zip(map(int, batch["number"]), batch["line"], strict=True))
        found: list[bytes] = []
        answers = self._answerer.answer_all(lines, lambda each: found.append(each.line()))
        self._run(answers)
        return {"answer": found}


def answer_on_ray(
    arguments: tuple[str, Sequence[str], Sequence[str]],
    replicas: int,
    replica_cpus: float,
    replica_gpus: float,
    lines: Lines,
    on_answer: OnAnswer,
) -> None:
    """Answer lines by so many engines; `on_answer` gets each answer as it comes, in this process.

    Args:
        arguments: LineActor's.

    Raises:
        EngineUnavailable: the run cannot go on.
    """
    items = [{"number": number, "line": line} for number, line in lines]
    blocks = min(len(items), max(replicas, len(items) // _LINES_AT_ONCE))
    answers = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
        LineActor,
        fn_constructor_args=arguments,
        **_pool(replicas, _LINES_AT_ONCE, _CALLS_AT_ONCE, replica_cpus, replica_gpus),
    )
    try:
        for row in answers.iter_rows():
            on_answer(msgspec.json.decode(row["answer"], type=BatchAnswer))
    except ray.exceptions.RayError as error:
        raise EngineUnavailable(f"the run on Ray ended: {error}") from error


def _pool(
    size: int | tuple[int, int], batch_size: int, calls: int, num_cpus: float, num_gpus: float
) -> dict[str, Any]:
    """Keywords of `map_batches`. An actor that is lost is started again, and its rows are given to
    it or another one."""
    smallest, largest = (size, size) if isinstance(size, int) else size
    return {
        "batch_size": batch_size,
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "compute": ActorPoolStrategy(
            min_size=smallest,
            max_size=largest,
            max_concurrent_calls_per_actor=calls,
            max_tasks_in_flight_per_actor=2 * calls,
            enable_true_multi_threading=True,
        ),
    }


# ------------------------------------------------------------------ rows of a Dataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineProcessorConfig:
    """As ray.data.llm's vLLMEngineProcessorConfig.

    Args:
        model_source: a folder, file or known name, on each node.
        engine_kwargs: the options of `LLM`.
        concurrency: engines, or the fewest and the most.
        batch_size: rows of one call of an actor.
        max_concurrent_batches: calls of an actor at once.
        should_continue_on_error: a row that cannot be answered has its reason in column
            `__inference_error__`; else it ends the run.
        num_cpus, num_gpus: of each engine.
    """

    model_source: str
    engine_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    concurrency: int | tuple[int, int] = 1
    batch_size: int = 32
    max_concurrent_batches: int = 8
    should_continue_on_error: bool = False
    num_cpus: float = 1.0
    num_gpus: float = 0.0


class RowActor(_EngineActor):
    """For `map_batches` with `batch_format="pyarrow"`. Each row has `messages` or `prompt`, and may
    have `sampling_params`; it gets `generated_text`, `generated_tokens`, `num_input_tokens`,
    `num_generated_tokens` and `finish_reason`.

    Args:
        engine_kwargs: the options of `LLM`.
        keeps_errors: see `EngineProcessorConfig.should_continue_on_error`.
    """

    def __init__(
        self,
        model: str,
        engine_kwargs: Mapping[str, Any] | None = None,
        *,
        keeps_errors: bool = False,
    ) -> None:
        super().__init__(model, daemon_arguments(model, engine_kwargs or {})[2:])
        self._keeps_errors = keeps_errors

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Raises EngineClientError: a row cannot be answered, and errors are not kept."""
        found = self._run(self._answers(batch.to_pylist()))
        for name, kind in _COLUMNS.items():
            if name != ERROR_COLUMN or self._keeps_errors:
                column = pa.array([each.get(name) for each in found], kind)
                if name in batch.column_names:
                    batch = batch.drop_columns([name])
                batch = batch.append_column(name, column)
        return batch

    async def _answers(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return await asyncio.gather(*map(self._answer, rows))

    async def _answer(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            output = await self._output(_without_nulls(row))
        except (EngineUnavailable, EngineDied):
            raise
        except (EngineClientError, ValueError) as error:
            if not self._keeps_errors:
                raise
            return {ERROR_COLUMN: str(error)}
        text = output.outputs[0]
        if text.finish_reason == "error":
            if not self._keeps_errors:
                raise EngineClientError(text.detail or "the engine ended the request")
            return {ERROR_COLUMN: text.detail}
        return {
            "generated_text": text.text,
            "generated_tokens": list(text.token_ids),
            "num_input_tokens": len(output.prompt_token_ids),
            "num_generated_tokens": len(text.token_ids),
            "finish_reason": text.finish_reason,
            ERROR_COLUMN: "",
        }

    async def _output(self, row: Mapping[str, Any]) -> RequestOutput:
        given = row.get("sampling_params", {})
        if given.get("n", 1) != 1:
            raise InvalidInput(f"n is {given['n']}, a row has one text; give the row n times")
        defaults = self._llm.get_default_sampling_params() if not given else SamplingParams()
        params = dataclasses.replace(defaults, **given, output_kind=RequestOutputKind.FINAL_ONLY)
        if "messages" in row:
            prompt: PromptInput = await self._llm.chat_prompt(row["messages"])
        elif "prompt" in row:
            prompt = row["prompt"]
        else:
            raise InvalidInput(f"a row has columns {sorted(row)}; give messages or prompt")
        outputs = [each async for each in self._llm.generate(prompt, params)]
        return outputs[-1]


_COLUMNS = {
    "generated_text": pa.string(),
    "generated_tokens": pa.list_(pa.int64()),
    "num_input_tokens": pa.int64(),
    "num_generated_tokens": pa.int64(),
    "finish_reason": pa.string(),
    ERROR_COLUMN: pa.string(),
}


def build_processor(
    config: EngineProcessorConfig,
    preprocess: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    postprocess: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Callable[[Dataset], Dataset]:
    """As ray.data.llm's `build_processor`: rows, with what `preprocess` adds to them, pass through
    a RowActor, and are what `postprocess` makes of them. Rows with an error are not given to it.

    ```python
    processor = build_processor(
        EngineProcessorConfig(model_source="smollm2-135m-instruct", concurrency=2),
        preprocess=lambda row: {"prompt": row["text"], "sampling_params": {"max_tokens": 16}},
    )
    processor(ray.data.read_parquet("texts/")).write_parquet("answers/")
    ```
    """

    def process(rows: Dataset) -> Dataset:
        if preprocess is not None:
            rows = rows.map(lambda row: row | preprocess(row))
        rows = rows.map_batches(
            RowActor,
            fn_constructor_args=(config.model_source, dict(config.engine_kwargs)),
            fn_constructor_kwargs={"keeps_errors": config.should_continue_on_error},
            batch_format="pyarrow",
            **_pool(
                config.concurrency,
                config.batch_size,
                config.max_concurrent_batches,
                config.num_cpus,
                config.num_gpus,
            ),
        )
        if postprocess is not None:
            no_error = {ERROR_COLUMN: ""} if config.should_continue_on_error else {}
            rows = rows.map(
                lambda row: row if row.get(ERROR_COLUMN) else postprocess(row) | no_error
            )
        return rows

    return process


def _without_nulls(value: Any) -> Any:
    """Arrow gives each row the fields of all others, too."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
