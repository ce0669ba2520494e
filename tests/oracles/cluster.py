"""The API of Kubernetes as far as Kvist asks it, which keeps to that API's rules. It is no kube-apiserver."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "cluster-token"


class Cluster:
    """Objects of one kind, the events of their history that are remembered, and who watches.

    Lists carry a version, a watch tells all that came after one, in order, and says that it is gone where it remembers
    less. Of selectors only the one by name is obeyed.
    """

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
        self._watches: dict[asyncio.Queue[bytes | None], str | None] = {}
        """Which of them wants to hear of which object alone."""

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
        for watch, name in self._watches.items():
            if name in (None, value["metadata"]["name"]):
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

    async def answer(self, query: dict[str, list[str]], head: str, writer: asyncio.StreamWriter) -> None:
        self.asked.append(query)
        if f"authorization: bearer {self.token}" not in head.lower():
            return refuse(writer, 401, "the test says so")
        if self.refusals:
            return refuse(writer, self.refusals.pop(0), "the test says so")
        return await self._watch(query, writer) if "watch" in query else self._list(query, writer)

    def _list(self, query: dict[str, list[str]], writer: asyncio.StreamWriter) -> None:
        wanted, begin = _name_in(query), int(query.get("continue", ["0"])[0])
        items = [each for name, each in self.objects.items() if wanted in (None, name)]
        assert int(query["limit"][0]) > 0
        end = len(items) if self.page_size is None else begin + self.page_size
        metadata = {"resourceVersion": str(self.version)}
        if end < len(items):
            metadata["continue"] = str(end)
        send(writer, 200, {"kind": f"{self.kind}List", "metadata": metadata, "items": items[begin:end] or None})

    async def _watch(self, query: dict[str, list[str]], writer: asyncio.StreamWriter) -> None:
        assert query["allowWatchBookmarks"] == ["true"]
        assert int(query["timeoutSeconds"][0]) > 0
        since = int(query["resourceVersion"][0])
        if since < self.oldest:
            return refuse(writer, 410, "too old resource version")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        watch: asyncio.Queue[bytes | None] = asyncio.Queue()
        name = _name_in(query)
        for version, event in self.events:
            if version > since and name in (None, event["object"]["metadata"]["name"]):
                watch.put_nowait(json.dumps(event).encode() + b"\n")
        self._watches[watch] = name
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
            del self._watches[watch]


def _name_in(query: dict[str, list[str]]) -> str | None:
    if "fieldSelector" not in query:
        return None
    field, _, name = query["fieldSelector"][0].partition("=")
    assert field == "metadata.name"
    return name


def refuse(writer: asyncio.StreamWriter, status: int, message: str) -> None:
    send(writer, status, {"kind": "Status", "status": "Failure", "message": message, "code": status})


def send(writer: asyncio.StreamWriter, status: int, value: Any) -> None:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


@asynccontextmanager
async def serving(*clusters: Cluster, tls: ssl.SSLContext | None = None) -> AsyncIterator[Cluster]:
    """Serve objects of several kinds, each at its path, and yield the first; other paths are not found."""
    tasks: set[asyncio.Task[None]] = set()
    by_path = {each.path: each for each in clusters}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, target, _ = head.split("\r\n", 1)[0].split(" ")
                parts = urlsplit(target)
                assert method == "GET"
                if parts.path in by_path:
                    await by_path[parts.path].answer(parse_qs(parts.query, strict_parsing=True), head, writer)
                else:
                    refuse(writer, 404, "the server could not find the requested resource")
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    for each in clusters:
        each.url = f"http{'' if tls is None else 's'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield clusters[0]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)


def write_kubeconfig(path: Path, cluster: Cluster, token: str = TOKEN, **more: str) -> None:
    """Write kubectl's configuration that leads to a cluster."""
    configuration = {
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": cluster.url, **more}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(json.dumps(configuration))  # which is YAML, too


def pod(address: str | None, ready: bool = True, **metadata: Any) -> dict[str, Any]:
    conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": str(ready)}]
    return {
        "metadata": metadata,
        "spec": {"containers": [{"ports": None}, {"ports": [{"name": "http", "containerPort": 8000}]}]},
        "status": {"podIP": address, "conditions": conditions},
    }
