"""Routes of the Responses API."""

from frontend.http.operations import Operation
from frontend.http.responses.bodies import ResponseEvent, ResponseObject, ResponsesRequest
from frontend.http.responses.route import create_response, get_response

OPERATIONS = [
    Operation(
        "POST", "/v1/responses", create_response, ResponsesRequest, ResponseObject, ResponseEvent
    ),
    Operation("GET", "/v1/responses/{response_id}", get_response, gives=ResponseObject),
]
