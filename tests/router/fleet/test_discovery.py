"""Workers that sources name come, and go when no source names them; a source that fails takes nobody away."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import nats
import pytest

from kvist.errors import InvalidValueError
from kvist.router.fleet import discovery
from kvist.router.fleet.discovery import Announcements
from kvist.router.sources import SourceUrl

TOKENS = list(range(1, 70))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_S", "MIN_RETRY_S", "MIN_TTL_S"):
        monkeypatch.setattr(discovery, name, 0.02)
    monkeypatch.setattr(discovery, "MAX_RETRY_S", 0.05)


async def source_of(front: Any) -> dict[str, Any]:
    (source,) = (await front.client.get("/readiness")).json()["discovery"]
    return source


async def until_failed(front: Any, reason: str) -> None:
    async def is_so() -> bool:
        source = await source_of(front)
        return source["state"] == "failed" and reason in source["reason"]

    await front.until(is_so)


async def until_ok(front: Any) -> None:
    async def is_so() -> bool:
        return (await source_of(front))["state"] == "ok"

    await front.until(is_so)


def write_toml(path: Path, *urls: str, more: str = "") -> None:
    path.write_text("".join(f'[[workers]]\nurl = "{url}"\n{more}\n' for url in urls) or "workers = []")


async def test_workers_of_a_file_come_and_go_with_it_and_a_broken_one_takes_nobody_away(
    worker, router, tmp_path: Path
) -> None:
    path = tmp_path / "workers.toml"
    async with worker() as one, worker() as two:
        write_toml(path, one.url, more='role = "decode"\nkv_event_sources = ["tcp://127.0.0.1:50003"]')
        async with router(discover=(f"file://{path}",)) as front:
            assert (await front.complete()).headers["x-kvist-worker"] == one.url
            explained = (await front.workers())[one.url]
            assert (explained["role"], explained["registered_by"]) == ("decode", [f"file://{path}"])
            await front.until_sources(one.url, "tcp://127.0.0.1:50003")
            write_toml(path, one.url, two.url)
            await front.until_state(two.url, "healthy")
            assert (await front.workers())[one.url]["role"] == "both"
            for broken, reason in (
                ("[[workers]]\nurl = ", "Invalid value"),
                ('[[workers]]\nurl = "ftp://x"', "http(s)://host"),
                ('[[workers]]\nurls = "http://x"', "unknown field `urls`"),
                ("", "missing required field `workers`"),
            ):
                path.write_text(broken)
                await until_failed(front, reason)
            path.unlink()
            await until_failed(front, "No such file")
            assert set(await front.workers()) == {one.url, two.url}
            metrics = await front.metrics()
            label = f'{{source="file://{path}"}}'
            assert metrics[f"kvist_router_discovery_up{label}"] == 0
            assert metrics[f"kvist_router_discovered_workers{label}"] == 2
            write_toml(path, two.url)
            await front.until_state(one.url, "gone")
            await until_ok(front)
            assert (await front.complete()).headers["x-kvist-worker"] == two.url


async def test_a_file_of_json_says_the_same(worker, router, tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    async with worker() as one:
        path.write_text(json.dumps({"workers": [{"url": one.url + "/", "role": "prefill"}]}))
        async with router(discover=(f"file://{path}",)) as front:
            assert (await front.workers())[one.url]["role"] == "prefill"


async def test_a_worker_stays_while_anybody_wants_it(worker, router, tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    async with worker() as named, worker() as added, worker() as found, worker() as own:
        write_toml(first, named.url, added.url, found.url)
        write_toml(second, found.url)
        sources = (f"file://{first}", f"file://{second}")
        async with router(named.url, discover=sources) as front:
            await front.client.post("/workers", json={"url": own.url})
            assert (await front.client.post("/workers", json={"url": added.url})).status_code == 409
            assert (await front.workers())[named.url]["registered_by"] == ["settings", sources[0]]
            write_toml(first)
            await front.until_state(added.url, "gone")
            assert set(await front.workers()) == {named.url, found.url, own.url}
            await front.client.delete("/workers", params={"url": found.url})
            await front.until_state(found.url, "gone")
            write_toml(second, found.url, added.url)  # which names nobody anew whom an administrator removed
            await front.until_state(added.url, "healthy")
            assert found.url not in await front.workers()
            write_toml(first, found.url)
            await front.until_state(found.url, "healthy")


async def test_sources_that_settings_drop_are_followed_no_more(worker, router, tmp_path: Path) -> None:
    path = tmp_path / "workers.toml"
    async with worker() as one, worker() as two, router(one.url) as front:
        write_toml(path, two.url)
        settings = front.service._config
        front.service.reload(replace(settings, discover=(f"file://{path}",)))
        await front.until_state(two.url, "healthy")
        front.service.reload(settings)
        await front.until_state(two.url, "gone")
        assert "discovery" not in (await front.client.get("/readiness")).json()


async def test_what_a_vanished_worker_was_expected_to_hold_is_forgotten_at_once(
    worker, router, tmp_path: Path, http_bytes, until
) -> None:
    path, go_on = tmp_path / "workers.toml", asyncio.Event()

    async def wait(received: Any, writer: asyncio.StreamWriter) -> None:
        if b"hold" in received.body:
            await go_on.wait()
        writer.write(http_bytes.response(http_bytes.completion()))

    async with worker(answer=wait) as one:
        write_toml(path, one.url)
        async with router(discover=(f"file://{path}",), block_size=16) as front:
            assert (await front.complete(TOKENS)).status_code == 200
            await front.until_overlap(one.url, TOKENS, 4)
            held = asyncio.create_task(front.complete("hold"))
            await until(lambda: len(one.completions) == 2)
            write_toml(path)
            await front.until_state(one.url, "draining")
            write_toml(path, one.url)
            await front.until_state(one.url, "healthy")
            (candidate,) = (await front.explain(TOKENS))["candidates"]
            assert candidate["overlap_blocks"]["gpu"] == 0
            go_on.set()
            assert (await held).status_code == 200


class NameServer(asyncio.DatagramProtocol):
    """Answers with the records it is given, or with an error."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.failure: dns.rcode.Rcode | None = None
        self.num_asked = self.ttl_s = 0
        self.port = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, address: Any) -> None:
        self.num_asked += 1
        question = dns.message.from_wire(data)
        answer = dns.message.make_response(question)
        name, kind = question.question[0].name.to_text(), dns.rdatatype.to_text(question.question[0].rdtype)
        if self.failure is not None:
            answer.set_rcode(self.failure)
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif records := self.records.get((name, kind)):
            answer.answer.append(dns.rrset.from_text(name, self.ttl_s, "IN", kind, *records))
        self.transport.sendto(answer.to_wire(), address)


@asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    yield server
    transport.close()


async def test_workers_are_the_addresses_of_a_name_while_it_has_them(worker, router, free_port, monkeypatch) -> None:
    monkeypatch.setattr(discovery, "DNS_TIMEOUT_S", 0.3)
    async with worker() as one, name_server() as server:
        name, port = "vllm.test.", free_port()
        server.records = {(name, "A"): ["127.0.0.1"], (name, "AAAA"): ["::1"]}
        url = f"dns://{name}:{one.port}?role=decode&nameserver=127.0.0.1:{server.port}"
        url += f"&kv_event_source=tcp://{{host}}:{port}"
        v6 = f"http://[::1]:{one.port}"
        async with router(discover=(url,), ready=False) as front:
            await front.until_state(one.url, "healthy")
            workers = await front.workers()
            assert {url: each["role"] for url, each in workers.items()} == {one.url: "decode", v6: "decode"}
            await front.until_sources(one.url, f"tcp://127.0.0.1:{port}")
            del server.records[name, "AAAA"]
            await front.until_state(v6, "gone")
            server.failure = dns.rcode.SERVFAIL
            await until_failed(front, "SERVFAIL")
            assert set(await front.workers()) == {one.url}
            server.failure = None
            await until_ok(front)
            server.records = {}  # no such name: an answer
            await front.until_state(one.url, "gone")
            server.records = {(name, "A"): ["127.0.0.1"]}
            await front.until_state(one.url, "healthy")


async def test_workers_are_the_targets_of_a_service(worker, router) -> None:
    async with worker() as one, name_server() as server:
        name = "_http._tcp.vllm.test."
        server.records = {(name, "SRV"): [f"0 0 {one.port} localhost.", "0 0 9 127.0.0.2."]}
        async with router(discover=(f"dns+srv://{name}?nameserver=127.0.0.1:{server.port}",), ready=False) as front:
            await front.until_state(f"http://localhost:{one.port}", "healthy")
            assert "http://127.0.0.2:9" in await front.workers()
            server.records = {(name, "SRV"): ["0 0 0 ."]}
            await front.until_state(f"http://localhost:{one.port}", "gone")


async def test_a_name_is_asked_for_again_when_its_answer_is_too_old(worker, router, until) -> None:
    async with worker() as one, name_server() as server:
        server.records = {("_http._tcp.a.test.", "SRV"): [f"0 0 {one.port} localhost."]}
        url = f"dns+srv://_http._tcp.a.test.?nameserver=127.0.0.1:{server.port}"
        async with router(discover=(url,), ready=False) as front:
            await until(lambda: server.num_asked > 3)
            server.ttl_s = 50
            num_asked = server.num_asked
            await until(lambda: server.num_asked > num_asked)
            await front.until_state(f"http://localhost:{one.port}", "healthy")
            num_asked = server.num_asked
            await asyncio.sleep(20 * discovery.MIN_TTL_S)
            assert server.num_asked == num_asked


async def test_a_name_is_followed_no_longer_than_until_its_task_is_cancelled_whenever_that_is() -> None:
    async with name_server() as server:
        server.records = {("_http._tcp.a.test.", "SRV"): ["0 0 80 localhost."]}
        url = SourceUrl.parse(f"dns+srv://_http._tcp.a.test.?nameserver=127.0.0.1:{server.port}")
        for num_turns in range(40):
            following = asyncio.create_task(discovery._follow_name(url, lambda _: None))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            following.cancel()
            await asyncio.wait([following], timeout=60)
            assert following.cancelled()


async def test_workers_announce_themselves_and_are_gone_when_they_are_silent(
    worker, router, start_nats_server, monkeypatch
) -> None:
    monkeypatch.setattr(discovery, "CONNECT_S", 1.0)
    server = start_nats_server()
    url = f"nats://user:secret@127.0.0.1:{server.port}/fleet.workers"
    async with worker() as one, worker() as two, router(discover=(url,)) as front:

        async def announce(*announcements: Any) -> None:
            client = await nats.connect(f"nats://127.0.0.1:{server.port}")
            for each in announcements:
                await client.publish("fleet.workers", each if isinstance(each, bytes) else json.dumps(each).encode())
            await client.close()

        @asynccontextmanager
        async def repeating(*announcements: Any) -> AsyncIterator[None]:
            is_over = False

            async def repeat() -> None:
                while not is_over:
                    await announce(*announcements)
                    await asyncio.sleep(0.1)

            task = asyncio.create_task(repeat())
            try:
                yield
            finally:
                is_over = True
                await task

        await until_ok(front)
        elsewhere = {"url": "http://127.0.0.1:9", "kv_event_sources": ["tcp://10.0.0.9:5557"]}
        both = [b"{", elsewhere, {"url": one.url, "role": "prefill", "later": 1}, {"url": two.url}]
        async with repeating(*both):
            await front.until_state(one.url, "healthy")
            await front.until_state(two.url, "healthy")
            workers = await front.workers()
            assert set(workers) == {one.url, two.url}
            assert workers[one.url]["role"] == "prefill"
            assert "secret" not in json.dumps([await source_of(front), workers])
        server.kill()
        await until_failed(front, "127.0.0.1")
        monkeypatch.setattr(discovery, "SILENCE_S", 0.5)
        for _ in range(15):  # longer than silence counts, and nobody can be heard
            await until_failed(front, "127.0.0.1")
            await asyncio.sleep(discovery.SILENCE_S / 10)
        assert set(await front.workers()) == {one.url, two.url}
        monkeypatch.setattr(discovery, "SILENCE_S", 5.0)  # longer than a busy machine is silent
        server.start()
        await until_ok(front)
        async with repeating({"url": one.url}):
            await front.until_state(two.url, "gone")
            assert (await front.workers())[one.url]["state"] == "healthy"
        await announce({"url": one.url, "leaving": True})
        await front.until_state(one.url, "gone")


async def test_nobody_is_taken_for_silent_by_a_router_that_did_not_run(
    worker, router, start_nats_server, until, monkeypatch
) -> None:
    server, ahead_s, num_looks, drop = start_nats_server(), 0.0, 0, Announcements._drop_silent

    def look(announcements: Announcements, since_s: float) -> None:
        nonlocal num_looks
        num_looks += 1
        drop(announcements, since_s)

    monkeypatch.setattr(Announcements, "_drop_silent", look)
    monkeypatch.setattr(discovery, "monotonic", lambda: monotonic() + ahead_s)
    async with worker() as one, router(discover=(f"nats://127.0.0.1:{server.port}/fleet.workers",)) as front:
        client = await nats.connect(f"nats://127.0.0.1:{server.port}")
        await until_ok(front)
        await client.publish("fleet.workers", json.dumps({"url": one.url}).encode())
        await front.until_state(one.url, "healthy")
        ahead_s = 2 * discovery.SILENCE_S
        num_before = num_looks
        await until(lambda: num_looks > num_before + 3)
        assert (await front.workers())[one.url]["state"] == "healthy"
        await client.close()


async def test_a_source_whose_extra_is_missing_says_which_to_install(worker, router, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "kvist.router.fleet.kubernetes", raising=False)
    monkeypatch.setitem(sys.modules, "lightkube.config.client_adapter", None)
    async with worker() as one, router(one.url, discover=("kubernetes://default/vllm",)) as front:
        await until_failed(front, "pip install 'kvist[kubernetes]'")
        assert (await front.complete()).status_code == 200


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://x", "file:///PATH.toml"),
        ("file:///etc/workers.yaml", ".toml"),
        ("file://host/workers.toml", ".toml"),
        ("dns://name", "dns://NAME:PORT"),
        ("dns://name:x", "dns://NAME:PORT"),
        ("dns://user:secret@name:8000", "dns://NAME:PORT"),
        ("dns://name:8000?nameserver=dns.example", "dns://NAME:PORT"),
        ("dns://name:8000?port=1", "only the options scheme, role, kv_event_source, nameserver, not port"),
        ("file:///etc/workers.toml?role=decode", "no options, not role"),
        ("dns://name:8000?scheme=ftp", "scheme to be http or https, not ftp"),
        ("dns://name:8000?role=boss", "role to be both or decode or prefill, not boss"),
        ("dns://name:8000?kv_event_source={host}:5557", "the URL of an event stream"),
        ("dns+srv://name", "_SERVICE._tcp.NAME"),
        ("kubernetes://default", "kubernetes://NAMESPACE/SERVICE"),
        ("kubernetes://default/svc?selector=a%3Db", "kubernetes://NAMESPACE/SERVICE"),
        ("kubernetes://default?selector=a%3Db", "port=NAME_OR_NUMBER"),
        ("kubernetes://default?selector=a%3Db&pool=p&port=1", "kubernetes://NAMESPACE/SERVICE"),
        ("kubernetes://default?pool=p&port=1", "no port beside pool"),
        ("nats://user:secret@host", "discover: got 'nats://***@host', expected nats://host:port/SUBJECT"),
        ("nats://host/fleet/workers", "nats://host:port/SUBJECT, a slash within a name written as %2F"),
        ("nats://host/fleet?role=decode", "discover: got 'nats://host/fleet?role=decode', expected only the options"),
    ],
)
def test_a_url_that_is_no_source_is_refused_by_what_is_wrong_with_it(url: str, expected: str) -> None:
    with pytest.raises(InvalidValueError, match="expected") as refusal:
        SourceUrl.parse(url)
    assert expected in str(refusal.value)
    assert "secret" not in str(refusal.value)
