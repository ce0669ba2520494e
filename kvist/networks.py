"""Checks of which hosts a service may dial or be administered from: loopback, and networks given as CIDR."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Sequence

from kvist.errors import InvalidValueError


def check_networks(name: str, networks: Sequence[str]) -> None:
    """Raise InvalidValueError, naming the field `name`, unless each is a network as CIDR."""
    for network in networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise InvalidValueError(name, network, f"a network as CIDR ({error})") from None


def is_in_networks(host: str, networks: Sequence[str]) -> bool:
    """Return whether the host is an address in one of the networks; a name never is, as it may resolve otherwise."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in ipaddress.ip_network(network) for network in networks)


@functools.lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Return whether the host is a loopback address, IPv4 in IPv6 included; a name never is."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
