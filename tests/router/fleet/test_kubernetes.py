"""Workers of a cluster are those of its last state, however watches end and whatever the API has forgotten.

The server here keeps to the API's rules (`cluster`). It is no kube-apiserver.
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

import pytest
import trustme
from cluster import TOKEN, Cluster, pod, serving, write_kubeconfig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightkube.config.kubeconfig import KubeConfig

from kvist.router.fleet import kubernetes
from kvist.router.fleet.discovery import SourceError
from kvist.router.fleet.kubernetes import KubernetesSource, Objectives
from kvist.router.sources import SourceUrl, WantedWorker

SLICES = "/apis/discovery.k8s.io/v1/namespaces/inference/endpointslices"
PODS = "/api/v1/namespaces/inference/pods"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/inference/inferencepools"
OBJECTIVES = "namespaces/inference/inferenceobjectives"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "MIN_WATCH_S", 0.0)
    monkeypatch.setattr("kvist.router.fleet.discovery.MAX_RETRY_S", 0.02)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Have kubectl's configuration lead to a cluster."""

    def write(cluster: Cluster, token: str = TOKEN, **more: str) -> None:
        write_kubeconfig(tmp_path / "kubeconfig", cluster, token, **more)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))

    return write


def endpoint(address: str, ready: bool | None = True, uid: str | None = None, **conditions: bool) -> dict[str, Any]:
    told = {"addresses": [address], "conditions": {"ready": ready, "serving": True, **conditions}}
    return told if uid is None else told | {"targetRef": {"kind": "Pod", "uid": uid}}


def slice_of(*endpoints: dict[str, Any], port: int = 8000, **fields: Any) -> dict[str, Any]:
    ports = [{"name": "http", "port": port, "protocol": "TCP"}, {"name": "events", "port": 5557}]
    return {"addressType": "IPv4", "endpoints": list(endpoints) or None, "ports": ports, **fields}


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
        async with asyncio.timeout(180):
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
        cluster.put("open", **slice_of(endpoint("10.0.0.9")) | {"ports": [{"name": "http", "port": None}]})
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
    async with serving(Cluster(SLICES, "EndpointSlice"), tls=tls) as cluster:
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
    async with serving(Cluster(SLICES, "EndpointSlice"), tls=tls) as cluster:
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


async def test_ready_pods_of_a_pool_are_workers_at_each_of_its_ports(use) -> None:
    pods, pools = Cluster(PODS, "Pod"), Cluster(POOLS, "InferencePool")
    async with serving(pods, pools):
        use(pods)
        pools.put("other", spec=pool_of(1, app="other"))
        pods.put("one", **pod("10.0.0.1", labels={"app": "vllm", "tier": "a"}))
        pods.put("two", **pod("10.0.0.2", labels={"app": "vllm"}))
        pods.put("three", **pod("10.0.0.3", labels={"app": "other"}))
        pods.put("four", **pod("10.0.0.4"))
        async with following("kubernetes://inference?pool=vllm&role=decode") as heard:
            await heard.until_workers()  # there is no such pool
            pools.put("vllm", spec=pool_of(8000, 8001, app="vllm"))
            ports = ("10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000", "10.0.0.2:8001")
            await heard.until_workers(*ports)
            assert {worker.role for worker in heard.workers.values()} == {"decode"}
            pods.put("two", **pod("10.0.0.2", ready=False, labels={"app": "vllm"}))
            await heard.until_workers(*ports[:2])
            pools.put("vllm", spec=pool_of(9000, app="vllm", tier="a"))
            await heard.until_workers("10.0.0.1:9000")
            for cluster in (pods, pools):
                cluster.refusals = [503]
                cluster.end()
                await heard.until(lambda: bool(heard.failures))
                assert "answered 503" in heard.failures.pop()
            pools.put("vllm", spec=pool_of(9000, app="other"))
            await heard.until_workers("10.0.0.3:9000")
            pools.delete("vllm")
            await heard.until_workers()
            assert not heard.failures


def pool_of(*ports: int, **labels: str) -> dict[str, Any]:
    picker = {"name": "kvist-epp", "port": {"number": 9002}, "failureMode": "FailOpen"}
    return {
        "selector": {"matchLabels": labels},
        "targetPorts": [{"number": port} for port in ports],
        "endpointPickerRef": picker,
    }


@pytest.mark.parametrize("group", ["llm-d.ai", "inference.networking.x-k8s.io"])
async def test_an_objective_has_the_priority_that_its_pool_gives_it(use, until, monkeypatch, group: str) -> None:
    monkeypatch.setattr(kubernetes, "OBJECTIVES_RETRY_S", 0.01)
    cluster = Cluster(f"/apis/{group}/v1alpha2/{OBJECTIVES}", "InferenceObjective")
    cluster.refusals = [403]
    cluster.put("batch", spec={"priority": -5, "poolRef": {"name": "vllm"}})
    cluster.put("chat", spec={"poolRef": {"name": "vllm"}})
    cluster.put("elsewhere", spec={"priority": -5, "poolRef": {"name": "other"}})
    async with serving(cluster):
        use(cluster)
        objectives = Objectives(SourceUrl.parse("kubernetes://inference?pool=vllm"))
        following = asyncio.create_task(objectives.follow())
        await until(lambda: objectives.priority("batch") == -5)
        assert [objectives.priority(name) for name in ("chat", "elsewhere", "nobody's")] == [0, 0, 0]
        cluster.put("batch", spec={"priority": 3, "poolRef": {"name": "vllm"}})
        await until(lambda: objectives.priority("batch") == 3)
        cluster.end()
        cluster.delete("batch")
        await until(lambda: objectives.priority("batch") == 0)
        assert not following.done()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


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
    for text in (None, "", "clusters: [", "{}", json.dumps({"clusters": [], "contexts": [], "current-context": "c"})):
        path = tmp_path / "kubeconfig"
        if text is not None:
            path.write_text(text)
        monkeypatch.setenv("KUBECONFIG", str(path) if text != "" else "~nobody-of-this-name/config")  # no home
        async with following(SERVICE) as heard:
            await heard.until(lambda: bool(heard.failures))
            assert "no configuration of a cluster" in heard.failures[0]


async def test_a_router_routes_to_the_endpoints_of_a_service(use, worker, router) -> None:
    async with worker() as one, serving(Cluster(SLICES, "EndpointSlice")) as cluster:
        use(cluster)
        cluster.put("a", **slice_of(endpoint("127.0.0.1"), port=one.port))
        async with router(discover=(SERVICE,)) as front:
            assert (await front.complete()).headers["x-kvist-worker"] == one.url
            assert (await front.workers())[one.url]["registered_by"] == [SERVICE]
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
