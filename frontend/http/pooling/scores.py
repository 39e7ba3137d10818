"""POST /score and /rerank, under the paths of vLLM, Jina and Cohere."""

from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.http.api_errors import ApiError
from frontend.http.event_stream import json_response, until_disconnect
from frontend.http.exchange import exchange_of
from frontend.http.operations import Operation
from frontend.http.pooling import bodies
from frontend.http.pooling.embeddings import MAX_INPUTS, head, params_of
from frontend.http.served_models import served_models
from frontend.pooling import ScoringRequestOutput

_PAIRS = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)


async def score(request: Request, asked: bodies.ScoreRequest) -> Response:
    """How well texts fit one text, or each its own."""
    llm = await served_models(request).get(asked.model)
    given = [pair for pair in _PAIRS if all(getattr(asked, each) is not None for each in pair)]
    if len(given) != 1:
        raise ApiError(400, "give text_1 and text_2, or queries and documents", param="text_1")
    first, second = (getattr(asked, each) for each in given[0])
    outputs = await _score(request, llm, asked, _texts(first), _texts(second), given[0][1])
    data = [
        bodies.Score(index=index, score=each.outputs.score) for index, each in enumerate(outputs)
    ]
    return json_response(bodies.Scores(data=data, **head("score", request, asked, outputs)))


async def rerank(request: Request, asked: bodies.RerankRequest) -> Response:
    """Documents by how well they fit a query, the best first."""
    llm = await served_models(request).get(asked.model)
    documents = [each if isinstance(each, str) else each.text for each in asked.documents]
    outputs = await _score(request, llm, asked, [asked.query], documents, "documents")
    results = [
        bodies.RerankResult(
            index=index,
            relevance_score=output.outputs.score,
            **({} if asked.return_documents is False else {"document": bodies.TextDocument(text)}),
        )
        for index, (output, text) in enumerate(zip(outputs, documents, strict=True))
    ]
    results.sort(key=lambda result: -result.relevance_score)
    fields = head("rerank", request, asked, outputs)
    del fields["created"]
    return json_response(bodies.Ranking(results=results[: asked.top_n or None], **fields))


async def _score(
    request: Request,
    llm: AsyncLLM,
    asked: bodies.PoolingRequest,
    first: list[str],
    second: list[str],
    param: str,
) -> list[ScoringRequestOutput]:
    if not 0 < len(second) <= MAX_INPUTS:
        raise ApiError(
            400, f"{param} has {len(second)} entries, give 1 to {MAX_INPUTS}", param=param
        )
    sent = exchange_of(request).sent_as(asked.user, asked.priority)
    answer = llm.score(first, second, params_of(asked), cache_salt=asked.cache_salt, **sent)
    return await until_disconnect(request, answer)


def _texts(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


OPERATIONS = [
    *(Operation("POST", path, score, bodies.ScoreRequest, bodies.Scores)
      for path in ("/score", "/v1/score")),
    *(Operation("POST", path, rerank, bodies.RerankRequest, bodies.Ranking)
      for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking")),
]  # fmt: skip
