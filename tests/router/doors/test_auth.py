"""Keys for clients, other keys for administration, and loopback where there is none."""

from __future__ import annotations

import pytest

from kvist.http import Request
from kvist.openai.errors import RequestError
from kvist.router.doors.auth import require_administrator, require_client


def request(peer: str | None = "127.0.0.1", host: bytes = b"127.0.0.1:30000", **headers: bytes) -> Request:
    fields = [(b"host", host), *((name.replace("_", "-").encode(), value) for name, value in headers.items())]
    return Request("GET", "/workers", fields, b"", (peer, 5000) if peer else None)


def test_without_a_key_every_client_is_served() -> None:
    require_client(request("203.0.113.9"), None, "admin")


@pytest.mark.parametrize("sent", [b"Bearer secret", b"bearer  secret"])
def test_the_right_key_opens(sent: bytes) -> None:
    require_client(request(authorization=sent), "secret", None)
    require_client(request(authorization=sent), "another", "secret")
    require_administrator(request("203.0.113.9", authorization=sent), "secret")


@pytest.mark.parametrize("sent", [None, b"secret", b"Bearer", b"Bearer Secret", b"Basic secret", b"Bearer secret\xff"])
def test_anything_else_is_a_401(sent: bytes | None) -> None:
    asked = request(**({} if sent is None else {"authorization": sent}))
    for require in (lambda: require_client(asked, "secret", None), lambda: require_administrator(asked, "secret")):
        with pytest.raises(RequestError) as refusal:
            require()
        assert refusal.value.status == 401


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("127.0.0.1", b"127.0.0.1:30000"),
        ("127.8.8.8", b"localhost"),
        ("::1", b"[::1]:30000"),
        ("::ffff:127.0.0.1", b"localhost:30000"),
    ],
)
def test_without_an_admin_key_loopback_administers(peer: str, host: bytes) -> None:
    require_administrator(request(peer, host), None)


@pytest.mark.parametrize(
    "asked",
    [
        request("10.0.0.8"),
        request("::ffff:10.0.0.8"),
        request(None),
        request(host=b"attacker.example"),
        request(host=b"attacker.example:30000"),
        request(x_forwarded_for=b"10.0.0.8"),
        request(forwarded=b"for=10.0.0.8"),
        request(x_real_ip=b"10.0.0.8"),
    ],
)
def test_without_an_admin_key_nobody_else_does(asked: Request) -> None:
    with pytest.raises(RequestError) as refusal:
        require_administrator(asked, None)
    assert (refusal.value.status, refusal.value.code) == (403, "admin_forbidden")
    assert refusal.value.message.startswith("GET /workers is for administrators: ")
