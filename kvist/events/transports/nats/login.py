"""How a client proves to a NATS server who it is: from the URL, and from the files it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nkeys
from nats.aio.client import RawCredentials

from kvist.errors import InvalidValueError
from kvist.events.transports.broker import BrokerUrl

_CREDENTIALS = re.compile(
    r"-----BEGIN NATS USER JWT-----\s+(\S+)\s+.*-----BEGIN USER NKEY SEED-----\s+(\S+)\s+---", re.DOTALL
)


def login_options(url: BrokerUrl) -> dict[str, Any]:
    """Return the client's options for the URL's login and TLS, its files read anew.

    Raises InvalidValueError for a file that cannot be used: nats-py would read one without a login for ever.
    """
    options: dict[str, Any] = {"tls": url.tls_context()}
    if url.password is not None:
        options |= {"user": url.user or "", "password": url.password}
    elif url.user is not None:
        options["token"] = url.user
    if "creds" in url.options:
        options["user_credentials"] = _credentials(url)
    if "nkey" in url.options:
        options["nkeys_seed_str"] = _checked_seed(url, "nkey", _read(url, "nkey").strip())
    return options


def _credentials(url: BrokerUrl) -> RawCredentials:
    found = _CREDENTIALS.search(_read(url, "creds"))
    if found is None:
        raise _invalid(url, "creds", "a user's JWT and the seed of its nkey in it")
    seed = _checked_seed(url, "creds", found[2])
    return RawCredentials(f"-----BEGIN NATS USER JWT-----\n{found[1]}\n-----BEGIN USER NKEY SEED-----\n{seed}\n-----\n")


def _checked_seed(url: BrokerUrl, option: str, seed: str) -> str:
    try:
        nkeys.from_seed(bytearray(seed.encode())).wipe()
    except (nkeys.NkeysError, ValueError):  # base32's errors are ValueErrors
        raise _invalid(url, option, "the seed of an nkey in it") from None
    return seed


def _read(url: BrokerUrl, option: str) -> str:
    try:
        return Path(url.options[option]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(url, option, f"a file that can be read ({error})") from None


def _invalid(url: BrokerUrl, option: str, expected: str) -> InvalidValueError:
    return InvalidValueError(f"endpoint {url.public}, {option}", url.options[option], expected)
