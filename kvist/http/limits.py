"""Every wait, buffer and count of the HTTP data path has one named bound, checked when the limits are built."""

import logging
import resource
from dataclasses import dataclass

from kvist.settings import Count, Seconds, check_fields

logger = logging.getLogger(__name__)

KIB = 1024
MIB = 1024 * KIB

_MAX_DESCRIPTORS = 1 << 20
"""More than this are not asked for, even where the hard limit allows them."""
_MAX_DEFAULT_CONNECTIONS = 1 << 16
"""So many idle ones take 0.3 GB; more have to be asked for."""


def default_max_connections() -> int:
    """Raise the descriptor limit as far as allowed, and return half of it as the number of clients.

    The other half is for what serves them: connections to workers, event streams, files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError) as error:
            logger.warning("limit of open files not raised: %s limit=%d", error, soft)
    num_descriptors = wanted if soft == resource.RLIM_INFINITY else soft
    max_connections = max(1, min(num_descriptors // 2, _MAX_DEFAULT_CONNECTIONS))
    logger.info("connections allowed max_connections=%d descriptors=%d", max_connections, num_descriptors)
    return max_connections


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one client, and all clients together, may cost the server. Raises InvalidValueError."""

    max_connections: Count = 4096
    """A connection beyond it takes the place of the one that is idle for longest.

    If none is idle, only `GET /health` is answered on it, and anything else with 503.
    """
    max_connections_per_peer: Count | None = None
    """Further connections of one address are treated as if none were idle; None: no such limit."""
    max_guests: Count = 64
    """Connections beyond these limits that may ask for `/health`; a further one closes the oldest of them."""
    guest_timeout_s: Seconds = 2.0
    """How long they may take to send their request."""
    max_request_line_bytes: Count = 8 * KIB
    max_header_bytes: Count = 32 * KIB
    max_headers: Count = 100
    max_body_bytes: Count = 32 * MIB
    max_buffered_body_bytes: Count = 1024 * MIB
    """All request bodies in memory, over all connections; a request beyond it is answered 503."""
    max_pipelined_bytes: Count = 64 * KIB
    """Bytes behind the current request before reading pauses; one read (256 KiB) may overshoot it.

    During the pause it is not noticed if the client leaves.
    """
    write_buffer_bytes: Count = 64 * KIB
    """Unsent response bytes above which `Responder.write` waits for the client."""
    idle_timeout_s: Seconds = 75.0
    """From a connection's start, or a response's end, to the first byte of the next request."""
    header_timeout_s: Seconds = 10.0
    """From the first byte of a request to the end of its head, however the bytes trickle in."""
    body_timeout_s: Seconds = 60.0
    """From the end of the head to the end of the body."""
    write_timeout_s: Seconds = 60.0
    """How long a client may leave the write buffer above its high-water mark."""
    linger_timeout_s: Seconds = 1.0
    """How long unread input is discarded after a refusal, so that the client can read why."""
    close_timeout_s: Seconds = 10.0
    """How long running requests may go on once the server is closing."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """What one worker may cost the router. Raises InvalidValueError."""

    max_idle_connections: Count = 256
    """Pooled connections kept for each worker; a further one is closed when its response ends."""
    max_header_bytes: Count = 64 * KIB
    max_headers: Count = 200
    max_informational_responses: Count = 8
    read_buffer_bytes: Count = 64 * KIB
    """Unread response bytes above which reading from the worker pauses; one read (256 KiB) may overshoot it."""
    max_connecting: Count = 32
    """Connections being opened to a worker at a time: requests beyond them wait for these, or for one that is free."""
    connect_timeout_s: Seconds = 3.0
    first_byte_timeout_s: Seconds = 600.0
    """From the request to the end of the response head: a long prompt waits in the worker's queue."""
    idle_timeout_s: Seconds = 300.0
    """Between two pieces of a response body, counted only while the client keeps up."""
    pooled_timeout_s: Seconds = 4.0
    """How long an unused connection is kept: below the 5 s after which uvicorn closes it."""

    def __post_init__(self) -> None:
        check_fields(self)
