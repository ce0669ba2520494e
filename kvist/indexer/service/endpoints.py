"""Which endpoints the service dials, and where it asks for a replay."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

from kvist.errors import InvalidValueError
from kvist.events.transports import Endpoint, public_url
from kvist.indexer.service.errors import ApiError
from kvist.networks import is_in_networks


@dataclass(frozen=True, slots=True)
class EndpointRules:
    """The operator's say about endpoints that come with a registration."""

    allowed_networks: tuple[str, ...] = ()
    """Where endpoints must be, as addresses; with none, anywhere."""
    has_replay: bool = True
    """Whether a stream that names no replay port is asked at the next one."""

    def url(self, endpoint: str, replay_endpoint: str | None = None) -> str:
        """Return the URL to follow for what was registered; raises ApiError (400, 403)."""
        try:
            parsed = Endpoint.parse(endpoint)
            url = self.with_replay(endpoint, replay_endpoint)
        except InvalidValueError as error:
            raise ApiError(HTTPStatus.BAD_REQUEST, str(error)) from None
        if parsed.scheme not in ("tcp", "ipc") and parsed.broker is None:
            expected = "tcp://host:port, ipc:///path or a broker's URL"
            raise ApiError(HTTPStatus.BAD_REQUEST, f"endpoint: got {endpoint!r}, expected {expected}")
        if parsed.broker is not None and parsed.broker.names_files:
            got, expected = public_url(endpoint), "a URL without files of this host; --workers may name them"
            raise ApiError(HTTPStatus.FORBIDDEN, f"endpoint: got {got!r}, expected {expected}")
        if self.allowed_networks and not self._is_allowed(parsed):
            networks = ", ".join(self.allowed_networks)
            got = public_url(endpoint)
            raise ApiError(HTTPStatus.FORBIDDEN, f"endpoint: got {got!r}, expected an address in {networks}")
        return url

    def with_replay(self, endpoint: str, replay_endpoint: str | None = None) -> str:
        """Return the URL with its replay port; raises InvalidValueError for one on another host than the stream."""
        options = endpoint.partition("?")[2]
        if replay_endpoint is not None:
            option = f"replay_port={_replay_port(endpoint, replay_endpoint)}"
        elif self.has_replay or "replay_port=" in options or not endpoint.startswith("tcp://"):
            return endpoint
        else:
            option = "replay_port=none"
        return f"{endpoint}{'&' if options else '?'}{option}"

    def _is_allowed(self, endpoint: Endpoint) -> bool:
        if endpoint.broker is not None:
            return all(is_in_networks(host.name, self.allowed_networks) for host in endpoint.broker.hosts)
        host = urlsplit(endpoint.address).hostname or ""
        return endpoint.scheme == "tcp" and not endpoint.is_bound and is_in_networks(host, self.allowed_networks)


def _replay_port(endpoint: str, replay_endpoint: str) -> str:
    host, _, _ = endpoint.partition("?")[0].rpartition(":")
    replay_host, _, port = Endpoint.parse(replay_endpoint).address.rpartition(":")
    if replay_host not in (host, "tcp://*"):
        raise InvalidValueError("replay_endpoint", replay_endpoint, f"a port on the stream's own host, {host}:port")
    return port
