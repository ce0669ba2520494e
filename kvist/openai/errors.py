"""Errors in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence
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
        allowed_methods: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allowed_methods = allowed_methods


def invalid_field(param: str, problem: str, *, code: str | None = None) -> RequestError:
    """Return the error (400) of a request whose field `param` has a problem; its message names both."""
    return RequestError(400, f"{param}: {problem}", param=param, code=code)


def error_body(error: RequestError) -> bytes:
    """Return a JSON body that clients of OpenAI and Anthropic understand: `{"error": {message, type, …}, "type"}`."""
    kind = "server_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    if error.status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    return msgspec.json.encode(
        {
            "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code},
            "type": "error",
        }
    )


def error_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    """Return the headers that HTTP wants with an error: when to try again, what is allowed, how to log in."""
    headers = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if error.allowed_methods:
        headers.append((b"allow", ", ".join(error.allowed_methods).encode()))
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def error_event(error: RequestError, *, is_named: bool) -> bytes:
    """Return the server-sent event that ends a stream with an error; those of responses and messages are named."""
    return (b"event: error\n" if is_named else b"") + b"data: " + error_body(error) + b"\n\n"
