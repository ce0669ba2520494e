"""Reads workers, and the priorities of requests, from the API of Kubernetes.

    workers       the endpoints of a service, pods by their labels, or those of an InferencePool at each of its ports
    objectives    the InferenceObjectives of a pool: a request names one, which has a priority

Objects are listed once and then watched. A watch that ends is resumed from the last resource version, which bookmarks
update, too; if the API has forgotten that one (410), everything is listed again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, NoReturn

import msgspec

from kvist.errors import MissingExtraError
from kvist.router.sources import SourceUrl, WantedWorker

try:
    import httpx2
    import yaml
    from lightkube.config.client_adapter import AsyncClient, ConnectionParams
    from lightkube.config.kubeconfig import KubeConfig
    from lightkube.core.exceptions import ConfigError
except ModuleNotFoundError as error:
    raise MissingExtraError("kubernetes", str(error.name)) from error

from kvist.router.fleet.discovery import SourceError

logger = logging.getLogger(__name__)

ROLE = "kvist.dev/role"
"""The label or annotation, of a pod or of a service, that gives workers a role."""
PAGE_SIZE = 500
WATCH_S = 300.0
"""How long a watch is asked for; one that sends nothing for a tenth longer is cut."""
TIMEOUT_S = 10.0
MIN_WATCH_S = 1.0
"""A watch that ends sooner is resumed only after about that time."""
POOLS = "inference.networking.k8s.io/v1"
OBJECTIVES = ("llm-d.ai/v1alpha2", "inference.networking.x-k8s.io/v1alpha2")
"""The API groups of these kinds; of those of objectives the first that has the object counts."""
OBJECTIVES_RETRY_S = 30.0
_GONE = 410


class _Struct(msgspec.Struct, frozen=True, rename="camel"):
    """A part of an object; what the API leaves out or sets to null is None."""


class _Metadata(_Struct, frozen=True):
    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None
    continue_: str | None = msgspec.field(name="continue", default=None)


class _Endpoint(_Struct, frozen=True):
    addresses: list[str]
    conditions: dict[str, bool | None] = {}
    target_ref: dict[str, Any] | None = None


class _Object(_Struct, frozen=True):
    """An EndpointSlice or a Pod; fields that only the other kind has are None or empty."""

    metadata: _Metadata
    address_type: str | None = None
    endpoints: list[_Endpoint] | None = None
    ports: list[dict[str, Any]] | None = None
    spec: dict[str, Any] = {}
    status: dict[str, Any] = {}

    @property
    def role(self) -> str | None:
        return {**(self.metadata.annotations or {}), **(self.metadata.labels or {})}.get(ROLE)


class _List(_Struct, frozen=True):
    metadata: _Metadata
    items: list[_Object] | None = None


class _Event(_Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _GoneError(Exception):
    """The API has forgotten the resource version that was asked for."""


class Watched:
    """The objects of one path of the API, kept up to date while `follow` runs; None until they are listed."""

    def __init__(self, path: str, **selectors: str) -> None:
        self.path, self._selectors = path, selectors
        self.objects: dict[str, _Object] | None = None
        self._version: str | None = None

    async def follow(self, client: httpx2.AsyncClient, on_change: Callable[[], None]) -> NoReturn:
        """Call `on_change` whenever objects have changed; raises SourceError."""
        try:
            while True:
                began_s = asyncio.get_running_loop().time()
                try:
                    if self._version is None:
                        await self._list(client)
                    await self._watch(client, on_change)
                except _GoneError:
                    self._version = None
                except SourceError:
                    self._version = None  # the API may refuse because of it
                    raise
                lasted_s = asyncio.get_running_loop().time() - began_s
                await asyncio.sleep(max(0.0, MIN_WATCH_S - lasted_s) * random.uniform(0.5, 1.0))
        except (httpx2.HTTPError, ConfigError) as error:
            raise SourceError(f"{self.path}: {error or type(error).__name__}") from None
        except msgspec.DecodeError as error:
            self._version = None  # resuming would skip the change that was not understood
            raise SourceError(f"{self.path}: {error}") from None

    async def _list(self, client: httpx2.AsyncClient) -> None:
        objects: dict[str, _Object] = {}
        params = self._selectors | {"limit": str(PAGE_SIZE)}
        while True:
            answer = await client.get(self.path, params=params)
            _check(answer.status_code, answer.content)
            page = msgspec.json.decode(answer.content, type=_List)
            objects |= {each.metadata.name: each for each in page.items or ()}
            if not page.metadata.continue_:
                break
            params["continue"] = page.metadata.continue_
        self.objects, self._version = objects, page.metadata.resource_version

    async def _watch(self, client: httpx2.AsyncClient, on_change: Callable[[], None]) -> None:
        assert self.objects is not None
        assert self._version is not None
        params = self._selectors | {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": self._version}
        params["timeoutSeconds"] = str(int(WATCH_S * random.uniform(0.5, 1.0)))
        timeout = httpx2.Timeout(TIMEOUT_S, read=WATCH_S * 1.1)
        async with client.stream("GET", self.path, params=params, timeout=timeout) as answer:
            if answer.status_code != 200:
                _check(answer.status_code, await answer.aread())
            on_change()
            async for line in _lines(answer):
                event = msgspec.json.decode(line, type=_Event)
                if event.type == "ERROR":
                    _check(msgspec.json.decode(event.object, type=dict[str, Any]).get("code"), event.object)
                changed = msgspec.json.decode(event.object, type=_Object)
                self._version = changed.metadata.resource_version
                if event.type == "BOOKMARK":
                    continue
                if event.type == "DELETED":
                    self.objects.pop(changed.metadata.name, None)
                else:
                    self.objects[changed.metadata.name] = changed
                on_change()


class KubernetesSource:
    """The workers of one source's URL; the listed objects are kept between two calls of `follow`."""

    def __init__(self, url: SourceUrl) -> None:
        self._url = url
        service, pods = url.path.strip("/"), f"api/v1/namespaces/{url.host}/pods"
        self._pool: Watched | None = None
        if service:
            path = f"apis/discovery.k8s.io/v1/namespaces/{url.host}/endpointslices"
            self._members = Watched(path, labelSelector=f"kubernetes.io/service-name={service}")
        elif "selector" in url.options:
            self._members = Watched(pods, labelSelector=url.options["selector"])
        else:
            path = f"apis/{POOLS}/namespaces/{url.host}/inferencepools"
            self._pool = Watched(path, fieldSelector=f"metadata.name={url.options['pool']}")
            self._members = Watched(pods)  # labels are matched here, as the pool's selector may change

    async def follow(self, report: Callable[[Iterable[WantedWorker]], None]) -> NoReturn:
        """Report the workers whenever they change; raises SourceError. Credentials are read again at each call."""

        def on_change() -> None:
            if self._members.objects is not None and (self._pool is None or self._pool.objects is not None):
                report(self._workers(self._members.objects))

        async with await asyncio.to_thread(_make_client) as client:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for each in filter(None, (self._members, self._pool)):
                        tasks.create_task(each.follow(client, on_change), name=f"kvist-watch {each.path}")
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None
        raise AssertionError("a watch goes on until it fails")

    def _workers(self, members: dict[str, _Object]) -> Iterable[WantedWorker]:
        workers: dict[str, WantedWorker] = {}
        # A pod with addresses of both kinds is one worker.
        for each in sorted(members.values(), key=lambda each: (each.address_type or "", each.metadata.name)):
            for name, worker in self._pod(each) if each.address_type is None else self._endpoints(each):
                workers.setdefault(name, worker)
        return workers.values()

    def _endpoints(self, slice_: _Object) -> Iterator[tuple[str, WantedWorker]]:
        for port in self._ports(slice_.ports or ()):
            for each in slice_.endpoints or ():
                is_ready = each.conditions.get("ready") is not False and not each.conditions.get("terminating")
                if each.addresses and is_ready:
                    name = (each.target_ref or {}).get("uid") or each.addresses[0]
                    yield name, self._url.worker(each.addresses[0], port, slice_.role)

    def _pod(self, pod: _Object) -> Iterator[tuple[str, WantedWorker]]:
        conditions = {each["type"]: each["status"] for each in pod.status.get("conditions") or ()}
        address, is_going = pod.status.get("podIP"), pod.metadata.deletion_timestamp is not None
        if conditions.get("Ready") == "True" and address and not is_going:
            declared = [port for each in pod.spec.get("containers") or () for port in each.get("ports") or ()]
            for port in self._ports_of_pool(pod) if self._pool else self._ports(declared):
                yield f"{pod.metadata.name}:{port}", self._url.worker(address, port, pod.role)

    def _ports_of_pool(self, pod: _Object) -> list[int]:
        """Return the pool's ports, each of which is a worker, if the pool selects the pod."""
        assert self._pool is not None
        for pool in (self._pool.objects or {}).values():
            wanted = pool.spec.get("selector", {}).get("matchLabels")
            if wanted and wanted.items() <= (pod.metadata.labels or {}).items():
                return [each["number"] for each in pool.spec["targetPorts"]]
        return []

    def _ports(self, ports: Iterable[dict[str, Any]]) -> list[int]:
        """Return the port that the URL asks for or, if it does not, the only one; a pod need not declare a number.

        A slice may have a port without a number, which stands for all of them.
        """
        named = ((each.get("name") or "", each.get("port") or each.get("containerPort")) for each in ports)
        numbers: dict[str, int] = {name: number for name, number in named if number}
        wanted = self._url.options.get("port")
        if wanted is None:
            return list(numbers.values()) if len(numbers) == 1 else []
        if wanted.isdecimal():
            is_there = "selector" in self._url.options or int(wanted) in numbers.values()
            return [int(wanted)] if is_there else []
        return [numbers[wanted]] if wanted in numbers else []


class Objectives:
    """The priorities of a pool's InferenceObjectives, kept up to date while `follow` runs."""

    def __init__(self, url: SourceUrl) -> None:
        self._pool = url.options["pool"]
        self._places = [Watched(f"apis/{place}/namespaces/{url.host}/inferenceobjectives") for place in OBJECTIVES]

    async def follow(self) -> NoReturn:
        """Follow the objectives forever; an API that has none or refuses is logged, and asked again later."""
        problems: dict[Watched, str] = {}
        while True:
            for place in self._places:
                try:
                    async with await asyncio.to_thread(_make_client) as client:
                        await place.follow(client, lambda: None)
                except (SourceError, OSError) as error:
                    if problems.get(place) != str(error):
                        problems[place] = str(error)
                        logger.info("inference objectives cannot be read path=%s reason=%s", place.path, error)
            await asyncio.sleep(OBJECTIVES_RETRY_S)

    def priority(self, name: str) -> int:
        """Return the priority of an objective, higher first; 0 if there is none of this name or it has none."""
        for place in self._places:
            if (found := (place.objects or {}).get(name)) and found.spec.get("poolRef", {}).get("name") == self._pool:
                return found.spec.get("priority") or 0
        return 0


def _make_client() -> httpx2.AsyncClient:
    """Return a client of the cluster that this runs in or, outside of one, of the one that kubectl would use."""
    try:
        config = KubeConfig.from_env().get()
        assert config is not None  # `get` raises if there is none
        return AsyncClient(config, ConnectionParams(timeout=httpx2.Timeout(TIMEOUT_S)))
    except (ConfigError, yaml.YAMLError, httpx2.InvalidURL, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise SourceError(f"no configuration of a cluster: {error}") from None


def _check(status: int | None, body: Any) -> None:
    """Raise _GoneError or SourceError unless the status is 200."""
    if status == _GONE:
        raise _GoneError
    if status != 200:
        try:
            reason = msgspec.json.decode(body, type=dict[str, Any]).get("message")
        except (msgspec.DecodeError, UnicodeDecodeError):
            reason = None
        raise SourceError(f"the API of Kubernetes answered {status}: {reason or 'it does not say why'}")


async def _lines(answer: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield whole lines without a cut last one, split at newlines only: texts may have Unicode line separators."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line:
                yield line
