"""Errors, split by who must act: the client, nobody (the client left), or the caller, who chooses another worker."""

import msgspec

from kvist.errors import KvistError


class MalformedHttpError(KvistError, ValueError):
    """Bytes that are not the HTTP/1 message they claim to be."""


class RequestRefusedError(KvistError):
    """The client must change its request (4xx), or come back later or elsewhere (5xx)."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message

    def body(self) -> bytes:
        """The refusal in the shape OpenAI clients parse."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return msgspec.json.encode({"error": {"message": self.message, "type": kind, "param": None, "code": self.code}})


class ClientDisconnectedError(KvistError, ConnectionError):
    """The client went away; nothing written from now on reaches anybody."""


class UpstreamError(KvistError):
    """A worker did not deliver a whole response; `is_ours`: for a reason that lies with us."""

    is_ours = False

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"worker {worker}: {reason}")
        self.worker = worker
        self.reason = reason


class ConnectError(UpstreamError):
    """No connection to the worker: no byte of the request was sent, any worker may be tried."""

    def __init__(self, worker: str, reason: str, *, is_ours: bool = False) -> None:
        super().__init__(worker, reason)
        self.is_ours = is_ours


class UpstreamClosedError(UpstreamError):
    """The worker closed the connection before the end of its response; it may have acted on the request."""


class UpstreamTimeoutError(UpstreamError):
    """The worker was silent too long before its response or within it; it may still act on the request."""


class UpstreamProtocolError(UpstreamError):
    """The worker's response is not valid HTTP/1; its connection is closed and never reused."""
