"""Endpoint URLs: one string that says where a stream is, and which engine's it is. docs/transports.md has their forms.

Port 0 lets a publisher take a free one. With `bind=1` one engine at a time is followed. Brokers' URLs are in `broker`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from kvist.errors import InvalidValueError
from kvist.events.transports.broker import BrokerUrl, is_broker_url, read_options, redacted

_OPTIONS = ("replay_port", "engine", "bind", "eagle")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed endpoint URL, without secrets in any text of it. `replay_address` None: there is no replay."""

    address: str
    replay_address: str | None
    engine: str = "vllm"
    is_bound: bool = False
    broker: BrokerUrl | None = None
    drops_last_block: bool = False

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Parse and check a URL to subscribe to; raises InvalidValueError naming what is wrong with it."""
        if is_broker_url(url):
            broker = BrokerUrl.parse(url).with_worker(None)
            return cls(broker.public, broker.public, broker.options.get("engine", "vllm").lower(), broker=broker)
        address, _, query = url.partition("?")
        url = redacted(url)  # for the errors, should a scheme be misspelt
        options = read_options(url, query, _OPTIONS)
        replay = _replay_address(url, address, options.get("replay_port"))
        engine, is_bound = options.get("engine", "vllm").lower(), options.get("bind") == "1"
        return cls(address, replay, engine, is_bound, drops_last_block="eagle" in options)

    def check_client(self) -> None:
        """Import the client of the endpoint's broker; raises MissingExtraError if it is not installed."""
        if self.broker is not None:
            import_module(f"kvist.events.transports.{'mqtt' if self.broker.is_mqtt else 'nats'}")

    @property
    def scheme(self) -> str:
        return self.address.partition("://")[0]

    @property
    def url(self) -> str:
        """Return the URL that parses to this endpoint's addresses; subscribers add engine and bind."""
        if self.scheme != "tcp":
            return self.address
        replay_port = "none" if self.replay_address is None else self.replay_address.rpartition(":")[2]
        return f"{self.address}?replay_port={replay_port}"


def _replay_address(url: str, address: str, replay_port: str | None) -> str | None:
    scheme, _, rest = address.partition("://")
    if replay_port is not None and scheme != "tcp":
        raise InvalidValueError("endpoint", url, f"no replay_port with {scheme}://")
    if scheme == "memory" and rest:
        return address
    if scheme == "ipc" and rest:
        return f"{address}.replay"
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or "/" in rest or host.startswith("[") != host.endswith("]"):
        raise InvalidValueError("endpoint", url, "tcp://host:port, ipc:///path, nats://…, mqtt://… or memory://name")
    port_number = _port(url, "port", port)
    if replay_port == "none":
        return None
    default = "0" if port_number == 0 else str(port_number + 1)
    replay_number = _port(url, "replay_port", default if replay_port is None else replay_port)
    return f"tcp://{host}:{replay_number}"


def _port(url: str, name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > 65535:
        raise InvalidValueError("endpoint", url, f"{name} from 0 to 65535")
    return int(text)
