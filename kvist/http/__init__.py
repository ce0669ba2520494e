"""The HTTP of router, index and engine: strict HTTP/1 in, pooled HTTP/1 out, bytes passed through with back-pressure.

`HttpServer` calls a handler with each valid `Request` and its `Responder`; `UpstreamPool.send` asks a worker.
Neither knows of policy. Each message is read by one strict parser and written with framing of our own, so nothing
ambiguous gets from one side to the other; each wait, buffer and count is a field of `HttpLimits` or `UpstreamLimits`.
"""

from kvist.http.deadline import Deadline, LoopClock
from kvist.http.errors import (
    ClientDisconnectedError,
    ConnectError,
    UpstreamClosedError,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamTimeoutError,
)
from kvist.http.fields import Headers
from kvist.http.limits import HttpLimits, UpstreamLimits, default_max_connections
from kvist.http.pool import UpstreamPool, UpstreamResponse
from kvist.http.request import Request
from kvist.http.responder import Responder
from kvist.http.server import Handler, HttpServer, Producer, ServerStatistics
from kvist.http.upstream import Exchange, ResponseReceiver

__all__ = [
    "ClientDisconnectedError",
    "ConnectError",
    "Deadline",
    "Exchange",
    "Handler",
    "Headers",
    "HttpLimits",
    "HttpServer",
    "LoopClock",
    "Producer",
    "Request",
    "Responder",
    "ResponseReceiver",
    "ServerStatistics",
    "UpstreamClosedError",
    "UpstreamError",
    "UpstreamLimits",
    "UpstreamPool",
    "UpstreamProtocolError",
    "UpstreamResponse",
    "UpstreamTimeoutError",
    "default_max_connections",
]
