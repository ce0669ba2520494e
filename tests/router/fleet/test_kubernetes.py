"""Workers of a cluster are those of its last state, however watches end and whatever the API has forgotten.

The server here keeps to the API's rules: lists carry a version, a watch tells all that came after one, in order, and
says that it is gone where it remembers less. It is no kube-apiserver.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import trustme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightkube.config.kubeconfig import KubeConfig

from kvist.router.fleet import kubernetes
from kvist.router.fleet.discovery import SourceError
from kvist.router.fleet.kubernetes import KubernetesSource
from kvist.router.sources import SourceUrl, WantedWorker

SLICES = "/apis/discovery.k8s.io/v1/namespaces/inference/endpointslices"
PODS = "/api/v1/namespaces/inference/pods"
TOKEN = "cluster-token"


class Cluster:
    """Objects of one kind, the events of their history that are remembered, and who watches."""

    def __init__(self, path: str, kind: str) -> None:
        self.path, self.kind, self.version = path, kind, 100
        self.objects: dict[str, dict[str, Any]] = {}
        self.events: list[tuple[int, dict[str, Any]]] = []
        self.oldest = 100
        """The oldest version that a watch may begin from."""
        self.page_size: int | None = None
        self.refusals: list[int] = []
        """Statuses that the next requests are answered with."""
        self.garbage: list[bytes] = []
        self.asked: list[dict[str, list[str]]] = []
        self.url, self.token = "", TOKEN
        self._watches: set[asyncio.Queue[bytes | None]] = set()

    # The state and its history.

    def put(self, name: str, **fields: Any) -> None:
        self.version += 1
        metadata = {"name": name, "resourceVersion": str(self.version), **fields.pop("metadata", {})}
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self.objects[name] = {"metadata": metadata, **fields}
        self._tell(kind, self.objects[name])

    def delete(self, name: str) -> None:
        self.version += 1
        gone = self.objects.pop(name)
        self._tell("DELETED", gone | {"metadata": gone["metadata"] | {"resourceVersion": str(self.version)}})

    def _tell(self, kind: str, value: dict[str, Any]) -> None:
        event = {"type": kind, "object": value}
        self.events.append((self.version, event))
        for watch in self._watches:
            watch.put_nowait(json.dumps(event).encode() + b"\n")

    @property
    def addresses(self) -> set[str]:
        """Where the ready endpoints are."""
        told = [endpoint for each in self.objects.values() for endpoint in each["endpoints"] or ()]
        ready = [endpoint for endpoint in told if endpoint["conditions"]["ready"] is not False]
        return {f"{address}:8000" for endpoint in ready for address in endpoint["addresses"]}

    def bookmark(self) -> None:
        """Tell watches the version as it is now, in an object that is empty but for that."""
        empty = {
            "metadata": {"resourceVersion": str(self.version)},
            "endpoints": None,
            "ports": None,
            "addressType": "",
        }
        for watch in self._watches:
            watch.put_nowait(json.dumps({"type": "BOOKMARK", "object": empty}).encode() + b"\n")

    def repeat(self) -> None:
        """Tell what came last once more."""
        for watch in self._watches if self.events else ():
            watch.put_nowait(json.dumps(self.events[-1][1]).encode() + b"\n")

    def forget(self) -> None:
        """Remember nothing of what was before now."""
        self.oldest, self.events = self.version, []

    def expire(self) -> None:
        """End watches by an event that says that their version is gone."""
        failure = {"kind": "Status", "code": 410, "message": "too old resource version", "reason": "Expired"}
        for watch in self._watches:
            watch.put_nowait(json.dumps({"type": "ERROR", "object": failure}).encode() + b"\n")
            watch.put_nowait(None)

    def end(self) -> None:
        """End watches in order, as the API does after their time."""
        for watch in self._watches:
            watch.put_nowait(None)

    def cut(self, within: bytes = b"") -> None:
        """Cut watches, within an event."""
        for watch in self._watches:
            watch.put_nowait(b"cut" + within)

    # HTTP.

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                await self._answer(head, writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        method, target, _ = head.split("\r\n", 1)[0].split(" ")
        parts = urlsplit(target)
        query = parse_qs(parts.query, strict_parsing=True)
        assert (method, parts.path) == ("GET", self.path)
        self.asked.append(query)
        if f"authorization: bearer {self.token}" not in head.lower():
            return self._refuse(writer, 401, "the test says so")
        if self.refusals:
            return self._refuse(writer, self.refusals.pop(0), "the test says so")
        return await self._watch(query, writer) if "watch" in query else self._list(query, writer)

    def _refuse(self, writer: asyncio.StreamWriter, status: int, message: str) -> None:
        self._send(writer, status, {"kind": "Status", "status": "Failure", "message": message, "code": status})

    def _send(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    def _list(self, query: dict[str, list[str]], writer: asyncio.StreamWriter) -> None:
        items, begin = list(self.objects.values()), int(query.get("continue", ["0"])[0])
        assert int(query["limit"][0]) > 0
        end = len(items) if self.page_size is None else begin + self.page_size
        metadata = {"resourceVersion": str(self.version)}
        if end < len(items):
            metadata["continue"] = str(end)
        self._send(writer, 200, {"kind": f"{self.kind}List", "metadata": metadata, "items": items[begin:end] or None})

    async def _watch(self, query: dict[str, list[str]], writer: asyncio.StreamWriter) -> None:
        assert query["allowWatchBookmarks"] == ["true"]
        assert int(query["timeoutSeconds"][0]) > 0
        since = int(query["resourceVersion"][0])
        if since < self.oldest:
            return self._refuse(writer, 410, "too old resource version")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        watch: asyncio.Queue[bytes | None] = asyncio.Queue()
        for version, event in self.events:
            if version > since:
                watch.put_nowait(json.dumps(event).encode() + b"\n")
        self._watches.add(watch)
        try:
            while (data := await watch.get()) is not None:
                if data.startswith(b"cut"):
                    writer.write(b"%x\r\n%b" % (1000, data))  # and the rest of it never comes
                    await writer.drain()
                    raise ConnectionAbortedError
                for piece in (data[:7], data[7:]):  # a chunk is no line
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        finally:
            self._watches.discard(watch)


@asynccontextmanager
async def serving(cluster: Cluster, tls: ssl.SSLContext | None = None) -> AsyncIterator[Cluster]:
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await cluster.serve(reader, writer)
        except asyncio.CancelledError:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    cluster.url = f"http{'' if tls is None else 's'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield cluster
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "MIN_WATCH_S", 0.0)
    monkeypatch.setattr("kvist.router.fleet.discovery.MAX_RETRY_S", 0.02)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Have kubectl's configuration lead to a cluster."""

    def write(cluster: Cluster, token: str = TOKEN, **more: str) -> None:
        configuration = {
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": cluster.url, **more}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(configuration))  # which is YAML, too
        monkeypatch.setenv("KUBECONFIG", str(path))

    return write


def endpoint(address: str, ready: bool | None = True, uid: str | None = None, **conditions: bool) -> dict[str, Any]:
    told = {"addresses": [address], "conditions": {"ready": ready, "serving": True, **conditions}}
    return told if uid is None else told | {"targetRef": {"kind": "Pod", "uid": uid}}


def slice_of(*endpoints: dict[str, Any], port: int = 8000, **fields: Any) -> dict[str, Any]:
    ports = [{"name": "http", "port": port, "protocol": "TCP"}, {"name": "events", "port": 5557}]
    return {"addressType": "IPv4", "endpoints": list(endpoints) or None, "ports": ports, **fields}


def pod(address: str | None, ready: bool = True, **metadata: Any) -> dict[str, Any]:
    conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": str(ready)}]
    return {
        "metadata": metadata,
        "spec": {"containers": [{"ports": None}, {"ports": [{"name": "http", "containerPort": 8000}]}]},
        "status": {"podIP": address, "conditions": conditions},
    }


class Heard:
    """Who is wanted, as a source told last."""

    def __init__(self) -> None:
        self.workers: dict[str, WantedWorker] | None = None
        self.failures: list[str] = []
        self._changed = asyncio.Event()

    def tell(self, workers: Iterable[WantedWorker]) -> None:
        self.workers = {worker.url: worker for worker in workers}
        self._changed.set()

    def failed(self, error: Exception) -> None:
        self.failures.append(str(error))
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_workers(self, *addresses: str) -> None:
        wanted = {f"http://{address}" for address in addresses}
        await self.until(lambda: self.workers is not None and self.workers.keys() == wanted)


@asynccontextmanager
async def following(url: str) -> AsyncIterator[Heard]:
    """Follow a source as the router does, but ask again at once."""
    heard, source = Heard(), KubernetesSource(SourceUrl.parse(url))

    async def follow() -> None:
        while True:
            try:
                await source.follow(heard.tell)
            except (SourceError, OSError) as error:
                heard.failed(error)
            await asyncio.sleep(0)

    task = asyncio.create_task(follow())
    yield heard
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


SERVICE = "kubernetes://inference/vllm?port=http"


async def test_ready_endpoints_of_a_service_are_workers(use) -> None:
    async with serving(Cluster(SLICES, "EndpointSlice")) as cluster:
        use(cluster)
        cluster.put("a", **slice_of(endpoint("10.0.0.1"), endpoint("10.0.0.2", None), endpoint("10.0.0.3", False)))
        cluster.put("empty", addressType="IPv4", endpoints=None, ports=None)
        async with following(SERVICE) as heard:
            await heard.until_workers("10.0.0.1:8000", "10.0.0.2:8000")
            assert cluster.asked[0]["labelSelector"] == ["kubernetes.io/service-name=vllm"]
            going = endpoint("10.0.0.1", True, terminating=True)
            cluster.put("a", **slice_of(going, endpoint("10.0.0.3", True)))
            await heard.until_workers("10.0.0.3:8000")
            cluster.put("a", **slice_of(endpoint("10.0.0.3", uid="x"), port=9000))
            cluster.put("b", **slice_of(endpoint("fd00::3", uid="x"), endpoint("fd00::4"), addressType="IPv6"))
            await heard.until_workers("10.0.0.3:9000", "[fd00::4]:8000")  # a pod of both kinds is one
            role = {"labels": {"kvist.dev/role": "prefill"}}
            cluster.put("b", **slice_of(endpoint("10.0.0.5"), metadata=role))
            await heard.until_workers("10.0.0.3:9000", "10.0.0.5:8000")
            assert heard.workers is not None
            assert [worker.role for worker in heard.workers.values()] == [None, "prefill"]
            cluster.delete("a")
            cluster.delete("b")
            await heard.until_workers()
            assert not heard.failures


async def test_a_pod_uses_what_its_cluster_gives_it_and_its_token_may_change(monkeypatch, tmp_path: Path) -> None:
    account, authority = tmp_path / "serviceaccount", trustme.CA()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    account.mkdir()
    (account / "namespace").write_text("elsewhere")
    (account / "token").write_text(TOKEN)
    authority.cert_pem.write_to_path(str(account / "ca.crt"))
    # The folder is /var/run/secrets/kubernetes.io/serviceaccount in a pod.
    monkeypatch.setattr(KubeConfig.from_env.__func__, "__defaults__", (str(account), "/nowhere"))
    async with serving(Cluster(SLICES, "EndpointSlice"), tls) as cluster:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", cluster.url.rpartition(":")[2])
        cluster.put("a", **slice_of(endpoint("10.0.0.1")))
        async with following(SERVICE) as heard:
            await heard.until_workers("10.0.0.1:8000")
            cluster.token = "another"
            cluster.put("a", **slice_of(endpoint("10.0.0.2")))
            await heard.until_workers("10.0.0.2:8000")
            cluster.end()
            await heard.until(lambda: bool(heard.failures))
            assert "401" in heard.failures[0]
            (account / "token").write_text("another")
            cluster.put("a", **slice_of(endpoint("10.0.0.3")))
            await heard.until_workers("10.0.0.3:8000")


async def test_the_certificate_of_the_cluster_is_checked(use, tmp_path: Path) -> None:
    authority, tls = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    async with serving(Cluster(SLICES, "EndpointSlice"), tls) as cluster:
        use(cluster)
        cluster.put("a", **slice_of(endpoint("10.0.0.1")))
        async with following(SERVICE) as heard:
            await heard.until(lambda: bool(heard.failures))
            assert "CERTIFICATE_VERIFY_FAILED" in heard.failures[0]
            use(cluster, **{"certificate-authority": "ca.pem"})
            await heard.until_workers("10.0.0.1:8000")


async def test_ready_pods_with_a_label_are_workers(use) -> None:
    async with serving(Cluster(PODS, "Pod")) as cluster:
        use(cluster)
        cluster.put("one", **pod("10.0.0.1", annotations={"kvist.dev/role": "decode"}))
        cluster.put("two", **pod("10.0.0.2", ready=False))
        cluster.put("three", **pod(None, labels={"kvist.dev/role": "boss"}))
        url = "kubernetes://inference?selector=app%3Dvllm,tier%20in%20(a,b)&port=http&role=prefill"
        url += "&kv_event_source=tcp://{host}:5557&scheme=https"
        async with following(url) as heard:
            await heard.until(lambda: heard.workers is not None)
            (worker,) = heard.workers.values()
            assert worker == WantedWorker("https://10.0.0.1:8000", ("tcp://10.0.0.1:5557",), "decode")
            assert cluster.asked[0]["labelSelector"] == ["app=vllm,tier in (a,b)"]
            cluster.put("one", **pod("10.0.0.1", deletionTimestamp="2026-01-01T00:00:00Z"))
            cluster.put("three", **pod("10.0.0.3", labels={"kvist.dev/role": "boss"}))
            await heard.until(lambda: list(heard.workers) == ["https://10.0.0.3:8000"])
            assert heard.workers["https://10.0.0.3:8000"].role == "prefill"
        async with following("kubernetes://inference?selector=app%3Dvllm&port=9000") as heard:
            await heard.until_workers("10.0.0.3:9000")


@pytest.mark.parametrize("status", [401, 403, 500, 503])
async def test_an_api_that_refuses_takes_nobody_away_and_says_why(use, status: int) -> None:
    async with serving(Cluster(SLICES, "EndpointSlice")) as cluster:
        use(cluster)
        cluster.put("a", **slice_of(endpoint("10.0.0.1")))
        async with following(SERVICE) as heard:
            await heard.until_workers("10.0.0.1:8000")
            if status == 401:
                cluster.token = "another"
            else:
                cluster.refusals = [status]
            cluster.put("a", **slice_of(endpoint("10.0.0.2")))
            await heard.until_workers("10.0.0.2:8000")
            cluster.end()
            await heard.until(lambda: bool(heard.failures))
            assert f"answered {status}: the test says so" in heard.failures[0]
            assert heard.workers is not None
            assert list(heard.workers) == ["http://10.0.0.2:8000"]
            use(cluster, cluster.token)  # credentials are read again
            cluster.put("a", **slice_of(endpoint("10.0.0.4")))
            await heard.until_workers("10.0.0.4:8000")


async def test_a_cut_watch_goes_on_where_it_was_and_a_bookmark_counts(use) -> None:
    async with serving(Cluster(SLICES, "EndpointSlice")) as cluster:
        use(cluster)
        cluster.put("a", **slice_of(endpoint("10.0.0.1")))
        async with following(SERVICE) as heard:
            await heard.until_workers("10.0.0.1:8000")
            for end in (cluster.cut, cluster.end):
                num_asked = len(cluster.asked)
                cluster.version += 1000  # of objects that do not match
                cluster.bookmark()
                cluster.forget()
                end()
                cluster.put("a", **slice_of(endpoint("10.0.0.3"), endpoint(f"10.0.1.{num_asked}")))
                await heard.until_workers("10.0.0.3:8000", f"10.0.1.{num_asked}:8000")
            lists = [query for query in cluster.asked if "watch" not in query]
            assert len(lists) == 1


async def test_what_the_api_has_forgotten_is_listed_anew_page_by_page(use) -> None:
    async with serving(Cluster(SLICES, "EndpointSlice")) as cluster:
        use(cluster)
        cluster.page_size = 2
        for idx in range(5):
            cluster.put(f"s{idx}", **slice_of(endpoint(f"10.0.0.{idx}")))
        async with following(SERVICE) as heard:
            await heard.until_workers(*(f"10.0.0.{idx}:8000" for idx in range(5)))
            cluster.end()
            cluster.delete("s0")
            cluster.forget()  # a watch from before that is refused by its status
            await heard.until_workers(*(f"10.0.0.{idx}:8000" for idx in range(1, 5)))
            cluster.expire()
            cluster.delete("s1")
            await heard.until_workers(*(f"10.0.0.{idx}:8000" for idx in range(2, 5)))
            assert not heard.failures


async def test_without_a_configuration_the_source_says_so(monkeypatch, tmp_path: Path) -> None:
    for text in (None, "clusters: [", "{}", json.dumps({"clusters": [], "contexts": [], "current-context": "c"})):
        path = tmp_path / "kubeconfig"
        if text is not None:
            path.write_text(text)
        monkeypatch.setenv("KUBECONFIG", str(path))
        async with following(SERVICE) as heard:
            await heard.until(lambda: bool(heard.failures))
            assert "no configuration of a cluster" in heard.failures[0]


async def test_a_router_routes_to_the_endpoints_of_a_service(use, worker, router) -> None:
    async with worker() as one, serving(Cluster(SLICES, "EndpointSlice")) as cluster:
        use(cluster)
        cluster.put("a", **slice_of(endpoint("127.0.0.1"), port=one.port))
        async with router(discover=(SERVICE,)) as front:
            assert (await front.complete()).headers["x-kvist-worker"] == one.url
            assert (await front.workers())[one.url]["wanted_by"] == [SERVICE]
            (source,) = (await front.client.get("/readiness")).json()["discovery"]
            assert (source["state"], source["workers"]) == ("ok", 1)
            cluster.put("a", **slice_of())
            await front.until_state(one.url, "gone")


STEPS = st.sampled_from(
    ["put", "put", "put", "delete", "bookmark", "forget", "expire", "end", "cut", "refuse", "wait", "repeat", "miss"]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=10, max_size=40), seed=st.integers(0, 2**32))
async def test_whatever_happens_the_last_state_of_the_cluster_is_what_is_told(use, steps, seed) -> None:
    random = Random(seed)
    async with serving(Cluster(SLICES, "EndpointSlice")) as cluster:
        use(cluster)
        cluster.page_size = random.choice([None, 1, 2])
        async with following(SERVICE) as heard:
            for step in ["wait", *steps]:
                name = random.choice("abcd")
                match step:
                    case "put":
                        addresses = [f"10.0.{ord(name)}.{random.randrange(4)}" for _ in range(random.randrange(4))]
                        ready = [endpoint(each, random.choice([True, None, False])) for each in addresses]
                        cluster.put(name, **slice_of(*ready))
                    case "delete" if name in cluster.objects:
                        cluster.delete(name)
                    case "cut":
                        cluster.cut(b'{"type": "DELETED", "obj')
                    case "miss" if name in cluster.objects:
                        cluster.end()
                        cluster.delete(name)
                        cluster.forget()
                    case "refuse":
                        cluster.refusals.append(random.choice([401, 403, 410, 429, 500, 503]))
                    case "wait":
                        await heard.until_workers(*cluster.addresses)
                    case "bookmark" | "forget" | "expire" | "end" | "repeat":
                        getattr(cluster, step)()
            cluster.put("last", **slice_of(endpoint("10.9.9.9")))
            await heard.until_workers(*cluster.addresses)
