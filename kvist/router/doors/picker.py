"""The Gateway API's endpoint picker: Envoy asks over `ext_proc` which worker a request goes to, and carries it there.

    headers   Envoy sends the headers of a request; if a body follows, the picker waits for it
    body      whole, or in pieces (FULL_DUPLEX_STREAMED); then it answers with `x-gateway-destination-endpoint`, as a
              header and as metadata of `envoy.lb`, with two endpoints to fall back to, and the body for the worker
    answer    the response's headers stand for its first byte, and name the worker if the gateway fell back to another;
              the stream ends with the request, whose load is then released

A request that cannot be routed is refused at once, in OpenAI's form; so is one with an objective of negative priority
if no worker has room. Bodies of responses are not asked for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import grpc
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as services
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvist.contexts import BackgroundTasks, ComposedContext
from kvist.errors import InvalidValueError
from kvist.http import HttpServer, Request, Responder
from kvist.openai.errors import RequestError, error_body
from kvist.router.config import RouterConfig
from kvist.router.doors.auth import OPEN_PATHS, require_administrator
from kvist.router.doors.embedded import RoutedRequest, Router
from kvist.router.doors.keeper import Keeper, error_answer, question_of, send_answer
from kvist.router.fleet.worker import WorkerState
from kvist.router.sources import SourceUrl

if TYPE_CHECKING:
    from kvist.router.fleet.fleet import Fleet
    from kvist.router.fleet.kubernetes import Objectives

logger = logging.getLogger(__name__)

DESTINATION = "x-gateway-destination-endpoint"
"""The header, and the key in the metadata, with the endpoint that a request goes to."""
_METADATA, _SUBSET_METADATA, _SUBSET = "envoy.lb", "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_SERVED = "x-gateway-destination-endpoint-served"
_OBJECTIVE_HEADERS = "x-llm-d-inference-objective", "x-gateway-inference-objective"
_BUSY_STATUSES = frozenset({"429", "503"})
_NUM_FALLBACKS = 2
_PIECE_BYTES = 62 * 1024
_MORE_BYTES = 2**20
"""How much longer than the longest body a message may be: headers, and the piece by which a body is too long."""
_HEALTH_INTERVAL_S = 0.5
_STREAMED = ProcessingMode.FULL_DUPLEX_STREAMED
_SERVICE = pb.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name


class Picker(ComposedContext):
    """Serves `ext_proc` on the configuration's host and port while its context is open."""

    def __init__(self, config: RouterConfig, metrics_port: int | None = None) -> None:
        """Route by the configuration as `kvist route` does; clients' keys are the gateway's business.

        `metrics_port`, if given, serves the endpoints for operators that `kvist route` has.
        """
        self._config, self.metrics_port, self._is_draining = config, metrics_port, False
        self._router = Router(config)
        self.port = config.port

    async def _open(self, exits: AsyncExitStack) -> None:
        await exits.enter_async_context(self._router)
        max_bytes = self._config.max_body_bytes + _MORE_BYTES
        # Otherwise a second picker at the port would start, and get half of the connections.
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", max_bytes), ("grpc.so_reuseport", 0)])
        objectives = list(_objectives(self._config))
        processor = _Processor(self._router, self._config, objectives)
        services.add_ExternalProcessorServicer_to_server(processor, server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        self._router.certificates.for_clients()  # names a file that is wrong, which gRPC does not
        self.port = _listen(server, self._config)
        if self.metrics_port is not None:
            page = HttpServer(self._answer, host=self._config.host, port=self.metrics_port)
            self.metrics_port = (await exits.enter_async_context(page)).port
        await server.start()
        exits.push_async_callback(server.stop, self._config.shutdown_timeout_s)
        tasks = await exits.enter_async_context(BackgroundTasks())
        tasks.create_task(self._update_health(), name="kvist-picker-health")
        for each in objectives:
            tasks.create_task(each.follow(), name="kvist-picker-objectives")
        exits.push_async_exit(self._drain)

    def reload(self, config: RouterConfig) -> None:
        """Apply the settings that may change while it runs; raises InvalidValueError, and changes nothing, if not."""
        self._config = self._router.reload(config)

    async def _drain(self, kind: type[BaseException] | None, *_: object) -> None:
        """Fail `/readiness` and health checks for a while, so that gateways ask others before the picker stops."""
        self._is_draining = True
        await self._health.enter_graceful_shutdown()
        if kind is None:
            await asyncio.sleep(self._config.drain_delay_s)

    async def _answer(self, request: Request, responder: Responder) -> None:
        """Answer an operator."""
        keeper = self._router.view
        assert isinstance(keeper, Keeper)
        try:
            if request.path not in OPEN_PATHS:
                require_administrator(request, self._config.admin_key)
            answer = await keeper.answer(question_of(request, self._config, self._is_draining))
        except RequestError as error:
            answer = error_answer(error)
        send_answer(answer, responder)

    async def _update_health(self) -> None:
        statuses = health_pb2.HealthCheckResponse
        await self._health.set("liveness", statuses.SERVING)
        while True:
            is_ready = any(worker.state is WorkerState.HEALTHY for worker in self._router.view.fleet.workers)
            for name in ("", "readiness", _SERVICE):
                await self._health.set(name, statuses.SERVING if is_ready else statuses.NOT_SERVING)
            await asyncio.sleep(_HEALTH_INTERVAL_S)


def _objectives(config: RouterConfig) -> Iterator[Objectives]:
    """Yield the objectives of each InferencePool that workers come from; raises MissingExtraError."""
    for url in map(SourceUrl.parse, config.discover):
        if "pool" in url.options:
            from kvist.router.fleet.kubernetes import Objectives

            yield Objectives(url)


def _listen(server: Any, config: RouterConfig) -> int:
    address = f"[{config.host}]:{config.port}" if ":" in config.host else f"{config.host}:{config.port}"
    port: int
    try:
        if config.tls_certificate is None or config.tls_key is None:
            port = server.add_insecure_port(address)
            return port
        read, asks_for_one = partial(_certificates, config), config.client_ca is not None
        credentials = grpc.dynamic_ssl_server_credentials(read(), read, require_client_authentication=asks_for_one)
        port = server.add_secure_port(address, credentials)
        return port
    except RuntimeError:
        raise InvalidValueError("host and port", address, "a free address of this machine") from None


def _certificates(config: RouterConfig) -> Any:
    """Return what the files hold now, at each new connection; gRPC keeps to the last that it could use."""
    pair = Path(config.tls_key or "").read_bytes(), Path(config.tls_certificate or "").read_bytes()
    authority = None if config.client_ca is None else Path(config.client_ca).read_bytes()
    return grpc.ssl_server_certificate_configuration([pair], authority)


class _Processor(services.ExternalProcessorServicer):  # type: ignore[misc]
    def __init__(self, router: Router, config: RouterConfig, objectives: list[Objectives]) -> None:
        self._router, self._config, self._objectives = router, config, objectives

    async def Process(self, requests: AsyncIterator[Any], _context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Handle one HTTP request."""
        headers: dict[str, str] = {}
        routed: RoutedRequest | None = None
        allowed: frozenset[str] | None = None
        body, is_streamed = bytearray(), False
        try:
            async for request in requests:
                match request.WhichOneof("request"):
                    case "request_headers":
                        headers = _headers_of(request.request_headers)
                        allowed = _subset_of(request.metadata_context)
                        is_streamed = request.protocol_config.request_body_mode == _STREAMED
                        if not request.request_headers.end_of_stream:
                            if not is_streamed:
                                yield pb.ProcessingResponse(request_headers=pb.HeadersResponse())
                            continue
                        routed = await self._route(headers, b"", allowed)
                        yield self._destination(routed, "request_headers", {})
                    case "request_body":
                        body += request.request_body.body
                        if len(body) > self._config.max_body_bytes:
                            expected = f"at most {self._config.max_body_bytes} bytes"
                            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"body: expected {expected}")
                        if not request.request_body.end_of_stream:
                            continue
                        routed = await self._route(headers, bytes(body), allowed)
                        length = {"content-length": str(len(routed.body))}
                        if is_streamed:
                            yield self._destination(routed, "request_headers", length)
                            for piece in _pieces(routed.body):
                                yield piece
                        else:
                            is_changed = routed.body != body
                            yield self._destination(
                                routed, "request_body", length if is_changed else {}, is_changed=is_changed
                            )
                    case "response_headers":
                        if routed is not None:
                            _record_outcome(routed, request)
                        yield pb.ProcessingResponse(response_headers=pb.HeadersResponse())
                    case kind:  # trailers are passed on
                        reply = {"request_trailers": pb.TrailersResponse(), "response_trailers": pb.TrailersResponse()}
                        yield pb.ProcessingResponse(**{kind: reply[kind]}) if kind in reply else pb.ProcessingResponse()
        except RequestError as error:
            yield _refusal(error)
        finally:
            if routed is not None:
                routed.finish()

    async def _route(self, headers: dict[str, str], body: bytes, allowed: frozenset[str] | None) -> RoutedRequest:
        path = headers.get(":path", "").partition("?")[0].rstrip("/")
        urls = [worker.url for worker in self._router.view.fleet.workers]
        excluded = [] if allowed is None else [url for url in urls if endpoint_of(url) not in allowed]
        objective = next((headers[name] for name in _OBJECTIVE_HEADERS if name in headers), "")
        is_sheddable = any(each.priority(objective) < 0 for each in self._objectives)
        return await self._router.route(path, body, excluded, is_sheddable=is_sheddable)

    def _destination(
        self, routed: RoutedRequest, kind: str, more: dict[str, str], *, is_changed: bool = False
    ) -> pb.ProcessingResponse:
        """Return the answer that says where the request goes."""
        endpoints = ",".join(_endpoints_of(routed, self._router.view.fleet))
        headers = {DESTINATION: endpoints, **routed.headers, **more}
        common = pb.CommonResponse(header_mutation=_set_headers(headers), clear_route_cache=True)
        if is_changed:
            common.body_mutation.CopyFrom(pb.BodyMutation(body=routed.body))
        metadata = Struct()
        metadata.update({_METADATA: {DESTINATION: endpoints}})
        response = pb.HeadersResponse if kind == "request_headers" else pb.BodyResponse
        return pb.ProcessingResponse(dynamic_metadata=metadata, **{kind: response(response=common)})


def endpoint_of(url: str) -> str:
    """Return host and port of a worker, as Envoy names it."""
    parts = urlsplit(url)
    return parts.netloc if parts.port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"


def _endpoints_of(routed: RoutedRequest, fleet: Fleet) -> list[str]:
    """Return the chosen worker's endpoint, and those of the next best workers for the gateway to fall back to."""
    return [endpoint_of(url) for url in routed.decision.ranked_workers if fleet.get(url) is not None][
        : 1 + _NUM_FALLBACKS
    ]


def _headers_of(message: pb.HttpHeaders) -> dict[str, str]:
    return {each.key: (each.raw_value.decode("latin-1") or each.value) for each in message.headers.headers}


def _subset_of(context: Any) -> frozenset[str] | None:
    """Return the endpoints that the gateway allows for the request, None if it allows any."""
    hint = context.filter_metadata.get(_SUBSET_METADATA)
    if hint is None or _SUBSET not in hint.fields:
        return None
    subset = hint[_SUBSET]
    listed = subset.split(",") if isinstance(subset, str) else [each for each in subset if isinstance(each, str)]
    return frozenset(each.strip() for each in listed)


def _record_outcome(routed: RoutedRequest, request: Any) -> None:
    """Record what the headers of a response say of the worker."""
    headers, metadata = _headers_of(request.response_headers), request.metadata_context.filter_metadata.get(_METADATA)
    served_by = metadata[_SERVED] if metadata is not None and _SERVED in metadata.fields else None
    status = headers.get(":status", "")
    if served_by not in (None, endpoint_of(routed.worker)):  # the gateway fell back
        routed.finish(has_failed=True)
        return
    if status in _BUSY_STATUSES:
        routed.refused(headers.get("retry-after"))
    if status.startswith("2"):
        routed.answered()
    elif status.startswith("5"):
        routed.finish(has_failed=True)


def _pieces(body: bytes) -> Iterator[pb.ProcessingResponse]:
    for start in range(0, len(body) or 1, _PIECE_BYTES):
        piece = body[start : start + _PIECE_BYTES]
        streamed = pb.StreamedBodyResponse(body=piece, end_of_stream=start + _PIECE_BYTES >= len(body))
        common = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed))
        yield pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))


def _refusal(error: RequestError) -> pb.ProcessingResponse:
    headers = {"content-type": "application/json"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    status, details = HttpStatus(code=error.status), error.code or "refused"
    immediate = pb.ImmediateResponse(
        status=status, headers=_set_headers(headers), body=error_body(error), details=details
    )
    return pb.ProcessingResponse(immediate_response=immediate)


def _set_headers(headers: dict[str, str]) -> pb.HeaderMutation:
    """Return a mutation that sets these headers, and overwrites those of the same names."""
    overwrite = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return pb.HeaderMutation(
        set_headers=[
            HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode()), append_action=overwrite)
            for name, value in headers.items()
        ]
    )
