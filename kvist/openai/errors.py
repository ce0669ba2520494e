"""Errors in OpenAI's format."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from kvist.errors import KvistError


class RequestError(KvistError):
    """A request that is refused, with the HTTP status and the field (`param`) that the client must change."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


def invalid_field(param: str, problem: str, *, code: str | None = None) -> RequestError:
    """Return the error (400) of a request whose field `param` has a problem; its message names both."""
    return RequestError(400, f"{param}: {problem}", param=param, code=code)


def error_body(error: RequestError) -> bytes:
    """Return the JSON body that OpenAI clients understand: `{"error": {message, type, param, code}}`."""
    kind = "server_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return msgspec.json.encode(
        {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
    )


def error_event(error: RequestError) -> bytes:
    """Return the server-sent event that ends a stream with an error."""
    return b"data: " + error_body(error) + b"\n\n"
