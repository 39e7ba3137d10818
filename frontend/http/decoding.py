"""A request's body to the Struct that its route takes; what it is not is refused by name."""

import re
from typing import Any

import msgspec

from frontend.http.api_errors import ApiError

_MOST_UNKNOWN_NULLS = 32
_UNKNOWN = "Object contains unknown field `"
_NO_CHOICE = ("Invalid enum value ", "Invalid value ")


def decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """An unknown field that is null asks for nothing, as many clients send it: it is left out.

    Raises ApiError: the body is not what the route takes.
    """
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            return _decode_without_nulls(decoder, body, error)
    except RecursionError:
        raise ApiError(400, "the body nests too deeply; send fewer levels") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _refusal(error) from None


def _decode_without_nulls(
    decoder: msgspec.json.Decoder[Any], body: bytes, error: msgspec.ValidationError
) -> Any:
    document = msgspec.json.decode(body)
    for _ in range(_MOST_UNKNOWN_NULLS):
        what, path = _what_and_path(error)
        names = [name for name in re.sub(r"\[[^]]*]", "", path).split(".") if name]
        unknown = what.removeprefix(_UNKNOWN).rstrip("`")
        if not what.startswith(_UNKNOWN) or not _drop_nulls(document, names, unknown):
            break
        try:
            return msgspec.convert(document, decoder.type)
        except msgspec.ValidationError as another:
            error = another
    raise error


def _drop_nulls(value: Any, names: list[str], unknown: str) -> bool:
    """Whether there was any, at this place in all elements of the arrays on its path."""
    if isinstance(value, list):
        return True in [_drop_nulls(each, names, unknown) for each in value]
    if not isinstance(value, dict):
        return False
    if names:
        return _drop_nulls(value.get(names[0]), names[1:], unknown)
    if value.get(unknown, unknown) is not None:
        return False
    del value[unknown]
    return True


def _what_and_path(error: Exception) -> tuple[str, str]:
    what, _, path = str(error).partition(" - at `$")
    return what, path.rstrip("`").lstrip(".")


def _refusal(error: msgspec.DecodeError | UnicodeDecodeError) -> ApiError:
    what, param = _what_and_path(error)
    if what.startswith(_UNKNOWN):
        name = what.removeprefix(_UNKNOWN).rstrip("`")
        param = f"{param}.{name}" if param else name
        return ApiError(400, f"{param!r} is not supported; omit it", param=param)
    if missing := re.fullmatch(r"Object missing required field `(.+)`", what):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return ApiError(400, f"{param} is missing; give it", param=param)
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the body is not valid JSON: {error}")
    for prefix in _NO_CHOICE:
        if what.startswith(prefix):
            what = f"{what.removeprefix(prefix)} is not supported; /openapi.json lists what is"
    return ApiError(400, f"{param}: {what}" if param else what, param=param or None)
