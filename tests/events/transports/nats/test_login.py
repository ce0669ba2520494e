"""Each way to prove who one is opens the door, and nothing else does."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from pathlib import Path

import nkeys
import pytest

from kvist.errors import InvalidValueError
from kvist.events.transports import Message, ReplayRequest
from kvist.events.transports.broker import BrokerUrl
from kvist.events.transports.nats import login_options

TOPIC = b"kv/pod-1/0"


def new_key(prefix: int) -> nkeys.KeyPair:
    """Return a key pair of a kind: operator, account or user."""
    return nkeys.from_seed(nkeys.encode_seed(os.urandom(32), prefix))


def jwt(claims: dict[str, object], subject: bytes, issuer: nkeys.KeyPair) -> str:
    """Return a token as NATS reads it: signed by an nkey."""

    def part(value: dict[str, object]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    body = {"iat": int(time.time()), "iss": issuer.public_key.decode(), "sub": subject.decode(), "nats": claims}
    body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
    signed = f"{part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{part(body)}"
    return f"{signed}.{base64.urlsafe_b64encode(issuer.sign(signed.encode())).decode().rstrip('=')}"


def with_credentials(folder: Path) -> tuple[str, str]:
    """Return the configuration of a server that trusts an operator, and the query of a URL of one of its users."""
    operator, account, user = (
        new_key(prefix) for prefix in (nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER)
    )
    unlimited = {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": True, "conn": -1}
    operator_jwt = jwt({"type": "operator", "version": 2}, operator.public_key, operator)
    account_jwt = jwt({"type": "account", "version": 2, "limits": unlimited}, account.public_key, operator)
    user_jwt = jwt({"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1}, user.public_key, account)
    seed = user.seed.decode()
    (folder / "user.creds").write_text(
        f"-----BEGIN NATS USER JWT-----\r\n{user_jwt}\r\n------END NATS USER JWT------\r\n\r\n"
        f"-----BEGIN USER NKEY SEED-----\r\n{seed}\r\n------END USER NKEY SEED------\r\n"
    )
    preload = f"resolver_preload: {{ {account.public_key.decode()}: {account_jwt} }}"
    return f"operator: {operator_jwt}\nresolver: MEMORY\n{preload}", f"?creds={folder}/user.creds"


def with_nkey(folder: Path) -> tuple[str, str]:
    user = new_key(nkeys.PREFIX_BYTE_USER)
    (folder / "user.nk").write_bytes(user.seed + b"\n")
    return f"authorization {{ users: [ {{ nkey: {user.public_key.decode()} }} ] }}", f"?nkey={folder}/user.nk"


async def is_heard(wire, until, server, userinfo: str = "", query: str = "") -> None:
    """Publish and receive with this login."""
    url = wire.url(server, userinfo, query=query)
    publication = wire.publish(url)
    assert publication.endpoint == wire.url(server)
    async with wire.subscribe(url) as subscription:
        await until(lambda: subscription.num_connects == 1)
        wire.send(publication, 1)
        assert await wire.take(subscription, 1) == [1]


@pytest.mark.parametrize("make", [with_credentials, with_nkey])
async def test_a_file_opens_the_door(wire, until, tmp_path, make):
    config, query = make(tmp_path)
    server = wire.start_server(config)
    await is_heard(wire, until, server, query=query)
    async with wire.subscribe(wire.url(server)) as without:
        await until(lambda: "refused the login" in (without.problem or ""))


@pytest.mark.parametrize(
    ("config", "userinfo"),
    [('user: "kvist", password: "p@ss/w:rd"', "kvist:p%40ss%2Fw%3Ard@"), ('token: "s3cret"', "s3cret@")],
)
async def test_a_password_or_a_token_opens_the_door(wire, until, config, userinfo):
    await is_heard(wire, until, wire.start_server(f"authorization {{ {config} }}"), userinfo)


@pytest.mark.parametrize("text", ["", "-----BEGIN NATS USER JWT-----\nx\n------END", "\udcff"])
@pytest.mark.parametrize("option", ["creds", "nkey"])
def test_a_file_without_a_login_is_an_error_that_names_it(tmp_path, text, option):
    path = tmp_path / "file"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InvalidValueError, match=option) as error:
        login_options(BrokerUrl.parse(f"nats://h/m/w?{option}={path}"))
    assert error.value.value == str(path)


def test_a_seed_that_is_none_is_an_error_that_does_not_show_it(tmp_path):
    path = tmp_path / "file"
    path.write_text("-----BEGIN NATS USER JWT-----\nx.y.z\n------END\n-----BEGIN USER NKEY SEED-----\nSUSECRET\n------")
    with pytest.raises(InvalidValueError, match="seed of an nkey") as error:
        login_options(BrokerUrl.parse(f"nats://h/m/w?creds={path}"))
    assert "SUSECRET" not in str(error.value)


def permission(kind: str, *subjects: str) -> str:
    return f"{kind}: [{', '.join(json.dumps(subject) for subject in subjects)}]"


async def test_the_permissions_that_the_documentation_names_suffice(wire, until):
    place = "org%2Fmodel.pod-1"
    publisher = (
        permission(
            "publish",
            f"kvist.{place}.*",
            f"kvist-answer.{place}.*",
            *(f"$JS.API.STREAM.{do}.KV" for do in ("INFO", "CREATE")),
        ),
        permission("subscribe", f"kvist-ask.{place}", "_INBOX.>"),
    )
    reads = ("STREAM.INFO.KV", "STREAM.MSG.GET.KV", "CONSUMER.*.KV.>", "CONSUMER.MSG.NEXT.KV.*")
    subscriber = (
        permission("publish", f"kvist-ask.{place}", *(f"$JS.API.{read}" for read in reads)),
        permission("subscribe", f"kvist.{place}.*", f"kvist-answer.{place}.*", "_INBOX.>"),
    )
    users = [
        f"{{ user: {name}, password: p, permissions: {{ {', '.join(permissions)} }} }}"
        for name, permissions in (("publisher", publisher), ("subscriber", subscriber))
    ]
    server = wire.start_server(f"authorization {{ users: [ {', '.join(users)} ] }}", has_jetstream=True)
    kept = wire.keep([Message(TOPIC, 5, b"kept")])
    publication = wire.publish(wire.url(server, "publisher:p@", query="?jetstream=KV"))
    publication.serve_replay(kept)
    url = wire.url(server, "subscriber:p@", query="?jetstream=KV")
    async with wire.subscribe(url) as subscription:
        await until(lambda: subscription.num_connects == 1)
        wire.send(publication, 1)
        assert await wire.take(subscription, 1) == [1]
        assert await subscription.replay(ReplayRequest(TOPIC, 0), 60) == kept.messages
        publication.close(60)
        assert await subscription.replay(ReplayRequest(None, 0), 60) == [Message(TOPIC, 1, b"x")]
        async with wire.subscribe(f"{url}&deliver=all") as history:
            assert await wire.take(history, 1) == [1]
        assert subscription.problem is None
