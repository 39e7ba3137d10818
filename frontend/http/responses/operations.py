"""Routes of the Responses API."""

from __future__ import annotations

from frontend.http.operations import Operation
from frontend.http.responses.bodies import ResponseEvent, ResponseObject, ResponsesRequest
from frontend.http.responses.route import create_response, get_response

OPERATIONS = [
    Operation(
        method="POST",
        path="/v1/responses",
        handler=create_response,
        takes=ResponsesRequest,
        gives=ResponseObject,
        event=ResponseEvent,
    ),
    Operation(
        method="GET",
        path="/v1/responses/{response_id}",
        handler=get_response,
        gives=ResponseObject,
    ),
]
