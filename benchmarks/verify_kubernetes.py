"""Does discovery report what a real kube-apiserver holds, whatever ends, expires or may not be read?

Starts kube-apiserver and etcd, whose paths are given, with no other part of a cluster: this script writes what kubelets
and controllers would write. A source of each kind follows them as `kvist route --discover` does, with only the
permissions in `deploy/kubernetes/base/discovery.yaml`. A release before 1.21 has slices as `v1beta1` only, with the
same fields: they are read there. Ends with an error at the first difference.

    python benchmarks/verify_kubernetes.py --kube-apiserver PATH --etcd PATH [--save]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import httpx
import yaml
from _common import report, table

from kvist.router.fleet import kubernetes
from kvist.router.fleet.discovery import SourceError
from kvist.router.fleet.kubernetes import KubernetesSource, Objectives, Watched
from kvist.router.sources import SourceUrl

RIGHTS = Path(__file__).parents[1] / "deploy/kubernetes/base/discovery.yaml"
NAMESPACE, PODS = "inference", "api/v1/namespaces/inference/pods"
RBAC, DEFINITIONS = "apis/rbac.authorization.k8s.io/v1", "apis/apiextensions.k8s.io/v1/customresourcedefinitions"
KINDS = {
    kubernetes.POOLS: ("InferencePool", "inferencepools"),
    kubernetes.OBJECTIVES[0]: ("InferenceObjective", "inferenceobjectives"),
}
PATIENCE_S = 120.0
NUM_STEPS = 150


class Cluster:
    """A kube-apiserver and its etcd, which may be killed and started again."""

    def __init__(self, kube_apiserver: str, etcd: str, folder: Path) -> None:
        self._binary, self._etcd_binary, self._folder = kube_apiserver, etcd, folder
        self._ports = [free_port() for _ in range(3)]
        self.url, self._etcd_url = f"https://127.0.0.1:{self._ports[0]}", f"http://127.0.0.1:{self._ports[1]}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "tokens.csv").write_text("admin,admin,1,system:masters\nrouter,router,2\nnobody,nobody,3\n")
        key = ["openssl", "genrsa", "-out", str(folder / "key.pem"), "2048"]
        subprocess.run(key, check=True, capture_output=True)
        headers = {"authorization": "Bearer admin"}
        self.client = httpx.AsyncClient(base_url=self.url, verify=False, headers=headers, trust_env=False)

    def start_etcd(self) -> None:
        peer = f"http://127.0.0.1:{self._ports[2]}"
        urls = {"listen-client-urls": self._etcd_url, "advertise-client-urls": self._etcd_url}
        urls |= {"listen-peer-urls": peer, "initial-advertise-peer-urls": peer, "initial-cluster": f"default={peer}"}
        options = [f"--{name}={value}" for name, value in urls.items()]
        self._start("etcd", [self._etcd_binary, f"--data-dir={self._folder / 'data'}", *options])

    async def start_api(self) -> None:
        key = self._folder / "key.pem"
        options = {
            "etcd-servers": self._etcd_url,
            "bind-address": "127.0.0.1",
            "secure-port": self._ports[0],
            "cert-dir": self._folder / "certificates",
            "token-auth-file": self._folder / "tokens.csv",
            "authorization-mode": "RBAC",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-signing-key-file": key,
            "service-account-key-file": key,
            "service-cluster-ip-range": "10.96.0.0/24",
            "disable-admission-plugins": "ServiceAccount",
        }
        self._start("api", [self._binary, *(f"--{name}={value}" for name, value in options.items())])
        await until(self._is_ready)

    async def kill_api(self) -> None:
        self._processes["api"].send_signal(signal.SIGKILL)
        await asyncio.to_thread(self._processes["api"].wait)

    async def compact(self) -> None:
        """Have etcd forget all versions but the last."""
        async with httpx.AsyncClient(base_url=self._etcd_url, trust_env=False) as client:
            last = (await client.post("/v3/kv/range", json={"key": "AA=="})).json()["header"]["revision"]
            (await client.post("/v3/kv/compaction", json={"revision": last, "physical": True})).raise_for_status()

    async def put(self, path: str, name: str, **fields: Any) -> None:
        """Create an object, or replace the one of this name; of a pod its status is a part of its own."""
        metadata = {"name": name, **fields.pop("metadata", {})}
        answer = await self.client.post(path, json={**fields, "metadata": metadata})
        if answer.status_code == 409:
            answer = await self.client.get(f"{path}/{name}")
            metadata |= {"resourceVersion": answer.json()["metadata"]["resourceVersion"]}
            answer = await self.client.put(f"{path}/{name}", json={**answer.json(), **fields, "metadata": metadata})
        if answer.is_success and "status" in fields and path == PODS:
            patch = {"content-type": "application/merge-patch+json"}
            answer = await self.client.patch(f"{path}/{name}/status", json={"status": fields["status"]}, headers=patch)
        assert answer.is_success, answer.text

    async def delete(self, path: str, name: str) -> None:
        answer = await self.client.delete(f"{path}/{name}", params={"gracePeriodSeconds": 0})
        assert answer.is_success, answer.text

    async def define(self, place: str) -> None:
        """Have the API know a kind of objects."""
        kind, plural = KINDS[place]
        group, _, version = place.partition("/")
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        approved = {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/gateway-api-inference-extension"}
        spec = {
            "group": group,
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()},
            "scope": "Namespaced",
            "versions": [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        }
        about = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
        await self.put(DEFINITIONS, f"{plural}.{group}", **about, spec=spec, metadata={"annotations": approved})
        await until(lambda: self._is_listed(f"apis/{place}/namespaces/{NAMESPACE}/{plural}"))

    async def grant(self) -> None:
        """Let the token `router` do what the manifest lets a router do."""
        for manifest in yaml.safe_load_all(RIGHTS.read_text()):
            if manifest["kind"] == "RoleBinding":
                manifest["subjects"] = [{"kind": "User", "name": "router", "apiGroup": "rbac.authorization.k8s.io"}]
            if manifest["kind"].startswith("Role"):
                name = manifest.pop("metadata")["name"]
                await self.put(f"{RBAC}/namespaces/{NAMESPACE}/{manifest['kind'].lower()}s", name, **manifest)

    def use(self, token: str) -> None:
        """Have kubectl's configuration lead here, with this token."""
        config = {
            "clusters": [{"name": "c", "cluster": {"server": self.url, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        (self._folder / "kubeconfig").write_text(yaml.safe_dump(config))
        os.environ["KUBECONFIG"] = str(self._folder / "kubeconfig")

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _start(self, name: str, command: list[Any]) -> None:
        log = (self._folder / f"{name}.log").open("ab")
        self._processes[name] = subprocess.Popen([*map(str, command)], stdout=log, stderr=log)

    async def _is_ready(self) -> bool:
        assert self._processes["api"].poll() is None, (self._folder / "api.log").read_text()[-2000:]
        return await self._is_listed("readyz")

    async def _is_listed(self, path: str) -> bool:
        try:
            return (await self.client.get(path)).is_success
        except httpx.TransportError:
            return False


class Follower:
    """A source that is followed as the router does, and what it told last."""

    def __init__(self, url: str, slices: str = "") -> None:
        self._source = KubernetesSource(SourceUrl.parse(url))
        self._source._members.path = slices or self._source._members.path
        self.workers: set[str] = set()
        self.failures: list[str] = []
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            try:
                await self._source.follow(self._tell)
            except (SourceError, OSError) as error:
                self.failures.append(str(error))
            await asyncio.sleep(0.1)

    def _tell(self, workers: Iterable[Any]) -> None:
        self.workers = {worker.url for worker in workers}

    async def until(self, *addresses: str) -> None:
        wanted = {f"http://{address}" for address in addresses}
        try:
            await until(lambda: self.workers == wanted)
        except TimeoutError:
            raise AssertionError(f"told {self.workers}, expected {wanted}; failures {self.failures}") from None

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = condition()
            if found if not asyncio.iscoroutine(found) else await found:
                return
            await asyncio.sleep(0.05)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def slice_of(*addresses: str) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"kubernetes.io/service-name": "vllm"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [each], "conditions": {"ready": True}} for each in addresses],
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
    }


def pod_of(address: str, note: str = "", *, ready: bool = True) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {"labels": {"app": "vllm"}, "annotations": {"note": note}},
        "spec": {"containers": [{"name": "vllm", "image": "vllm", "ports": [{"name": "http", "containerPort": 8000}]}]},
        "status": {"phase": "Running", "podIP": address, "conditions": conditions},
    }


async def verify(cluster: Cluster) -> list[tuple[str, str]]:
    """Return what was done and what was seen; raises AssertionError."""
    rows = []
    version = (await cluster.client.get("apis/discovery.k8s.io")).json()["versions"][0]["version"]
    path = f"apis/discovery.k8s.io/{version}/namespaces/{NAMESPACE}/endpointslices"
    await cluster.put("api/v1/namespaces", NAMESPACE)
    for place in KINDS:
        await cluster.define(place)
    cluster.use("nobody")
    await cluster.put(path, "a", **slice_of("10.0.0.1", "10.0.0.2"))
    service = Follower(f"kubernetes://{NAMESPACE}/vllm?port=http", path)
    pods = Follower(f"kubernetes://{NAMESPACE}?selector=app%3Dvllm&port=http")
    pool = Follower(f"kubernetes://{NAMESPACE}?pool=vllm")
    await until(lambda: any("answered 403" in failure for failure in service.failures))
    rows.append(("a token without rights", service.failures[0].partition("403: ")[2][:60] + "…"))
    await cluster.grant()
    cluster.use("router")
    await service.until("10.0.0.1:8000", "10.0.0.2:8000")
    await cluster.put(path, "a", **slice_of("10.0.0.2"))
    await cluster.put(path, "b", **slice_of("10.0.0.3"))
    await service.until("10.0.0.2:8000", "10.0.0.3:8000")
    await cluster.delete(path, "a")
    await service.until("10.0.0.3:8000")
    rows.append(("endpoints of a service, with the manifest's rights", "put, changed and deleted: told"))

    await cluster.put(PODS, "one", **pod_of("10.0.1.1"))
    await cluster.put(PODS, "two", **pod_of("10.0.1.2", ready=False))
    await pods.until("10.0.1.1:8000")
    spec = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}, {"number": 8001}]}
    about = {"apiVersion": kubernetes.POOLS, "kind": "InferencePool"}
    pools = f"apis/{kubernetes.POOLS}/namespaces/{NAMESPACE}/inferencepools"
    await cluster.put(pools, "vllm", **about, spec=spec)
    await pool.until("10.0.1.1:8000", "10.0.1.1:8001")
    await cluster.put(PODS, "two", **pod_of("10.0.1.2"))
    await pods.until("10.0.1.1:8000", "10.0.1.2:8000")
    await cluster.delete(PODS, "one")
    await pool.until("10.0.1.2:8000", "10.0.1.2:8001")
    rows.append(("pods by label, and of a pool at its ports", "ready, not ready and deleted: told"))

    objectives = Objectives(SourceUrl.parse(f"kubernetes://{NAMESPACE}?pool=vllm"))
    following = asyncio.create_task(objectives.follow())
    place = kubernetes.OBJECTIVES[0]
    about = {"apiVersion": place, "kind": "InferenceObjective"}
    batch = {"priority": -5, "poolRef": {"name": "vllm"}}
    await cluster.put(f"apis/{place}/namespaces/{NAMESPACE}/inferenceobjectives", "batch", **about, spec=batch)
    await until(lambda: objectives.priority("batch") == -5)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    rows.append(("an InferenceObjective", "its priority is read"))

    num_lists = watch_lists()
    began_s, before = monotonic(), num_lists()
    while monotonic() - began_s < 4 * kubernetes.WATCH_S:  # of versions that no slice has
        await cluster.put(PODS, "two", **pod_of("10.0.1.2", f"{monotonic()}"))
        await asyncio.sleep(0.2)
    await cluster.compact()
    await cluster.put(path, "b", **slice_of("10.0.0.4"))
    await service.until("10.0.0.4:8000")
    rows.append(
        (
            f"watches that end after {kubernetes.WATCH_S:g} s, for {4 * kubernetes.WATCH_S:g} s",
            f"{num_lists() - before} lists",
        )
    )

    before = num_lists()
    await cluster.kill_api()
    await asyncio.sleep(1.0)
    assert service.workers == {"http://10.0.0.4:8000"}
    await cluster.compact()
    await cluster.start_api()
    await cluster.put(path, "b", **slice_of("10.0.0.5"))
    await service.until("10.0.0.5:8000")
    rows.append(("kube-apiserver killed and started, etcd compacted", f"nobody went; {num_lists() - before} lists"))

    random = Random(1)
    held: dict[str, list[str]] = {"b": ["10.0.0.5"]}
    for step in range(NUM_STEPS):
        name = random.choice("abcdef")
        if random.random() < 0.7:
            held[name] = [f"10.1.{ord(name)}.{random.randrange(250)}" for _ in range(random.randrange(4))]
            await cluster.put(path, name, **slice_of(*held[name]))
        elif held.pop(name, None) is not None:
            await cluster.delete(path, name)
        if step % 50 == 49:
            await cluster.kill_api()
            await cluster.compact()
            await cluster.start_api()
    await service.until(*(f"{address}:8000" for addresses in held.values() for address in addresses))
    rows.append((f"{NUM_STEPS} random changes, 3 of them before a kill", "the last state is told"))
    await asyncio.gather(*(each.close() for each in (service, pods, pool)))
    return rows


def watch_lists() -> Callable[[], int]:
    """Return what tells how often anything has been listed."""
    plain, times = Watched._list, []

    async def counted(self: Watched, client: Any) -> None:
        times.append(monotonic())
        await plain(self, client)

    Watched._list = counted  # type: ignore[method-assign]
    return lambda: len(times)


async def started(kube_apiserver: str, etcd: str) -> list[tuple[str, str]]:
    """Verify with these binaries."""
    kubernetes.WATCH_S = 10.0
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(kube_apiserver, etcd, Path(folder))
        try:
            cluster.start_etcd()
            await cluster.start_api()
            rows = await verify(cluster)
        finally:
            cluster.close()
    return rows


def main() -> None:
    """Verify, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kube-apiserver", required=True)
    parser.add_argument("--etcd", required=True)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    rows = asyncio.run(started(args.kube_apiserver, args.etcd))
    told = [
        subprocess.run([binary, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]
        for binary in (args.kube_apiserver, args.etcd)
    ]
    text = table(["what", "seen"], rows) + f"\n\n{', '.join(told)}"
    report("verify_kubernetes", text, {"told": told, "seen": dict(rows)}, ["lightkube"], args.save)


if __name__ == "__main__":
    main()
