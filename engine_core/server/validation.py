"""What this engine can serve: a request is checked here once, before the scheduler sees it. What
there is room for, the scheduler decides. A refusal names value, limit and next action."""

import dataclasses
import re
from typing import Literal, NoReturn

from engine_core.errors import RequestRefused
from engine_core.logits_processors import NamedProcessor, check_extra_args
from engine_core.pooler_config import PoolerConfig
from engine_core.server.combinations import check_beam_search, check_pooling
from protocol.errors import ErrorCode, InvalidParameter, PromptTooLong
from protocol.requests import EngineRequest, ModelLimits, check_name, check_timeout

NO_ADAPTERS = (
    "this engine was started without adapters; start it with --adapter NAME=FOLDER, or with "
    "--max-loras, or omit adapter"
)
_SEQUENCE_NAME = re.compile(r"#\d+\Z", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestValidator(ModelLimits):
    """What a request is measured against. Counts are in tokens, but for `max_num_seqs`."""

    scheduling_policy: Literal["fcfs", "priority", "fair"]
    logits_processors: tuple[NamedProcessor, ...] = ()
    no_beams: str = ""
    """The option for which no beam search is served."""
    pooler: PoolerConfig | None = None
    """None: no request may be pooled."""
    generates: bool = True
    fetches_blocks: bool = False
    """Whether it fetches blocks from other engines."""
    serves_adapters: bool = False
    has_grammars: bool = False
    """Whether requests may ask for structured outputs."""

    def check(self, request: EngineRequest) -> None:
        """Raises RequestRefused: the request cannot be served by this engine."""
        try:
            check_name("request_id", request.request_id)
            for name in ("tenant", "cache_salt", "adapter", "kv_source"):
                if (value := getattr(request, name)) is not None:
                    check_name(name, value)
        except InvalidParameter as error:
            _refuse(str(error))
        if _SEQUENCE_NAME.search(request.request_id):
            _refuse(
                f"request_id {request.request_id!r} ends like the name of a request's further "
                "sequence; let it not end with # and a number"
            )
        if request.kv_source is not None and not self.fetches_blocks:
            _refuse(
                f"kv_source is {request.kv_source!r}, and this engine fetches no blocks; omit it, "
                "or start the engine with --disaggregation-mode decode",
                ErrorCode.NOT_SUPPORTED,
            )
        if request.priority != 0 and self.scheduling_policy == "fcfs":
            _refuse(
                f"priority is {request.priority}, and the scheduling policy is fcfs, which does "
                "not use it; omit it, or start the engine with another --scheduling-policy",
                ErrorCode.NOT_SUPPORTED,
            )
        try:
            check_timeout(request.timeout_s)
            self.check_sequences(request.num_sequences, request.beam_search)
            num_generated = self._check_task(request)
            self.check_prompt(request.prompt_token_ids, num_generated=num_generated)
            if request.pooling_params is None:  # what a pooling request may not have is refused
                self.check_token_ids("output_token_ids", request.output_token_ids)
                self.check_sampling(request.sampling_params, len(request.prompt_token_ids))
                check_extra_args(self.logits_processors, request.sampling_params)
        except PromptTooLong as error:
            _refuse(str(error), ErrorCode.PROMPT_TOO_LONG)
        except InvalidParameter as error:
            _refuse(str(error))
        self._check_sequences(request)
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        if num_tokens + num_generated > self.max_model_len:
            _refuse(
                f"prompt and delivered tokens are {num_tokens}, the limit is "
                f"{self.max_model_len - 1}; nothing is left to generate",
                ErrorCode.PROMPT_TOO_LONG,
            )
        if request.adapter is not None and not self.serves_adapters:
            _refuse(NO_ADAPTERS, ErrorCode.NOT_SUPPORTED)
        if request.sampling_params.structured_output is not None and not self.has_grammars:
            _refuse(
                "structured_outputs need the model's tokenizer, which this engine does not have; "
                "omit them, or start it with --tokenizer",
                ErrorCode.NOT_SUPPORTED,
            )

    def _check_task(self, request: EngineRequest) -> int:
        """Returns the least number of tokens that are generated, 0 for a pooling request."""
        params = request.pooling_params
        if params is None:
            if not self.generates:
                assert self.pooler is not None
                tasks = ", ".join(self.pooler.tasks)
                _refuse(
                    f"the task is generate, this engine's tasks are {tasks}; ask for one of these, "
                    "or start it with --runner generate",
                    ErrorCode.NOT_SUPPORTED,
                )
            return 1
        if self.pooler is None:
            _refuse(
                f"the task is {params.task.value}, this engine's task is generate; start it with "
                "--convert embed or classify, or with a model made for that",
                ErrorCode.NOT_SUPPORTED,
            )
        check_pooling(request)
        self.pooler.check(params, len(request.prompt_token_ids))
        return 0

    def _check_sequences(self, request: EngineRequest) -> None:
        num_sequences = request.num_sequences
        if request.beam_search is not None:
            check_beam_search(
                request, request.beam_search, bool(self.logits_processors), self.no_beams
            )
        elif num_sequences > 1 and request.output_token_ids:
            _refuse(
                f"output_token_ids with num_sequences {num_sequences}: which sequence they belong "
                "to is not given; resume each sequence as a request of its own"
            )


def _refuse(message: str, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> NoReturn:
    raise RequestRefused(code, message)
