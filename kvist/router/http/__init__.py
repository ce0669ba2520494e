"""The router's HTTP data path: strict HTTP/1 in, pooled HTTP/1 out, bytes passed through with back-pressure both ways.

`HttpServer` calls a handler with each valid `Request` and its `Responder`; `UpstreamPool.exchange` asks a worker.
Neither knows of policy. Each message is read by one strict parser and written with framing of our own, so nothing
ambiguous gets from one side to the other; each wait, buffer and count is a field of `HttpLimits` or `UpstreamLimits`.
"""

from kvist.router.http.asgi import serve_asgi
from kvist.router.http.connection import Handler
from kvist.router.http.errors import (
    ClientDisconnectedError,
    ConnectError,
    RequestRefusedError,
    StaleConnectionError,
    UpstreamClosedError,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamTimeoutError,
)
from kvist.router.http.fields import Headers
from kvist.router.http.limits import HttpLimits, UpstreamLimits
from kvist.router.http.pool import PoolStatistics, UpstreamPool, UpstreamResponse
from kvist.router.http.request import Request
from kvist.router.http.responder import Responder
from kvist.router.http.server import HttpServer, ServerStatistics

__all__ = [
    "ClientDisconnectedError",
    "ConnectError",
    "Handler",
    "Headers",
    "HttpLimits",
    "HttpServer",
    "PoolStatistics",
    "Request",
    "RequestRefusedError",
    "Responder",
    "ServerStatistics",
    "StaleConnectionError",
    "UpstreamClosedError",
    "UpstreamError",
    "UpstreamLimits",
    "UpstreamPool",
    "UpstreamProtocolError",
    "UpstreamResponse",
    "UpstreamTimeoutError",
    "serve_asgi",
]
