"""From a client's message to a request that the scheduler takes."""

import dataclasses

import msgspec

from engine_core.scheduler import Request
from engine_core.scheduler.records.prompt_content import PromptContent
from engine_core.scheduler.records.prompt_report import PromptReport
from engine_core.server.access import owned_request
from engine_core.server.clients import Client
from engine_core.server.multimodal import MultiModalReader
from engine_core.server.prompt_embeds import PromptEmbedsReader, read_prompt_embeds, spelled_out
from engine_core.server.validation import RequestValidator
from protocol.requests import EngineRequest


@dataclasses.dataclass(frozen=True, slots=True)
class RequestReader:
    """Changes nothing.

    Attributes:
        isolates_tenants: a tenant finds no prefixes of another in the cache.
        prompt_embeds: reads hidden states; None: none are taken.
        multimodal: reads images and sounds.
    """

    validator: RequestValidator
    eos_token_ids: tuple[int, ...] = ()
    isolates_tenants: bool = False
    prompt_embeds: PromptEmbedsReader | None = None
    multimodal: MultiModalReader = dataclasses.field(default_factory=MultiModalReader)

    def check(self, message: EngineRequest) -> None:
        """Raises RequestRefused: this engine cannot serve the request."""
        self.validator.check(message)

    def read(
        self, client: Client, message: EngineRequest, now_s: float
    ) -> tuple[EngineRequest, Request]:
        """The request as it is noted, and as it is scheduled, of a message that passed `check`.
        Raises RequestRefused, ValueError: it cannot be served."""
        embeds, spans = read_prompt_embeds(self.prompt_embeds, message, client.frames)
        message = owned_request(client, message, isolates=self.isolates_tenants)
        request = Request(
            message,
            client_index=client.index,
            arrival_time=now_s,
            eos_token_ids=self.eos_token_ids,
            content=PromptContent(
                embeds=embeds,
                features=self.multimodal.read(message, client.frames),
                spans=spans,
            ),
            report=PromptReport.of(message, self.validator.pooler),
        )
        if spans:  # what knows prompts again knows them by their tokens
            token_ids = spelled_out(message.prompt_token_ids, spans)
            message = msgspec.structs.replace(message, prompt_token_ids=token_ids)
        return message, request
