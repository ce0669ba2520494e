"""Looks up host names, each in a thread of its own.

The threads that an event loop has for that are few, and do other work as well: some names for which no name server
answers would keep all of them busy, and hold up whoever else needs one.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from functools import partial
from ipaddress import ip_address

from kvist.contexts import run_in_daemon_thread

PATIENCE_S = 0.5
"""How long name servers are waited for before a name's addresses of before are used."""


class Name:
    """A host name whose last known addresses are used while no name server answers."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._known: list[str] = []
        self._look_up: asyncio.Task[list[str]] | None = None
        self._asked_s = 0.0

    async def addresses(self) -> list[str]:
        """Return the host's IP addresses, to be tried in this order; raises OSError where there is none."""
        if self._look_up is None or self._look_up.done():
            self._asked_s = asyncio.get_running_loop().time()
            self._look_up = asyncio.create_task(look_up(self._host), name="kvist-look-up")
            self._look_up.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        try:
            async with asyncio.timeout_at(self._asked_s + PATIENCE_S if self._known else None):
                self._known = await asyncio.shield(self._look_up)
        except TimeoutError:
            pass
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN or not self._known:
                raise
        return self._known


async def look_up(host: str, family: int = socket.AF_UNSPEC) -> list[str]:
    """Return the IP addresses of a host, to be tried in this order; raises OSError where there is none."""
    with suppress(ValueError):  # it is a name
        return [str(ip_address(host))]
    return await run_in_daemon_thread(partial(_ask_name_servers, host, family), f"kvist-look-up {host}")


def _ask_name_servers(host: str, family: int) -> list[str]:
    try:
        entries = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
    except UnicodeError as error:  # a part of the name is too long
        raise OSError(f"{host}: {error}") from None
    return [str(address[0]) for *_, address in entries]
