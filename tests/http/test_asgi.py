"""A Starlette application answers on the same port as the proxy."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvist.http import HttpServer, Request, Responder, serve_asgi

Serve = Callable[..., Awaitable[HttpServer]]
Connect = Callable[[HttpServer], Awaitable[Any]]
Until = Callable[[Callable[[], object]], Awaitable[None]]


async def show(request: StarletteRequest) -> Response:
    assert request.client is not None
    seen = {
        "method": request.method,
        "path": request.url.path,
        "query": dict(request.query_params),
        "name": request.path_params["name"],
        "host": request.headers["host"],
        "body": (await request.body()).decode(),
        "client": request.client.host,
    }
    return JSONResponse(seen, headers={"Connection": "keep-alive", "X-Mixed": "Case"})


async def stream(_: StarletteRequest) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        for i in range(5):
            yield b"%d" % i
            await asyncio.sleep(0)

    return StreamingResponse(pieces(), media_type="text/event-stream")


async def fail(_: StarletteRequest) -> Response:
    raise LookupError("on purpose")


async def empty(_: StarletteRequest) -> Response:
    return Response(status_code=204)


def app(*more: Route) -> Starlette:
    methods = ["GET", "POST"]
    routes = [Route("/show/{name}", show, methods=methods), Route("/stream", stream), Route("/empty", empty)]
    return Starlette(routes=[*routes, Route("/fail", fail), *more])


@pytest.fixture
def serve_app(serve: Serve) -> Callable[[Starlette], Awaitable[HttpServer]]:
    async def start(application: Starlette) -> HttpServer:
        async def handler(request: Request, responder: Responder) -> None:
            await serve_asgi(application, request, responder)

        return await serve(handler)

    return start


async def test_a_request_arrives_whole(serve_app: Any) -> None:
    server = await serve_app(app())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
        response = await client.post("/show/a%20b?x=1&y=%C3%A4", content=b"body")
    assert response.headers["x-mixed"] == "Case"
    assert "connection" not in response.headers
    assert response.json() == {
        "method": "POST",
        "path": "/show/a b",
        "query": {"x": "1", "y": "ä"},
        "name": "a b",
        "host": f"127.0.0.1:{server.port}",
        "body": "body",
        "client": "127.0.0.1",
    }


async def test_responses_stream_and_the_connection_is_kept(serve_app: Any) -> None:
    server = await serve_app(app())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
        for _ in range(2):
            assert (await client.get("/stream")).text == "01234"
            assert (await client.get("/empty")).status_code == 204
            assert (await client.get("/nowhere")).status_code == 404
            assert (await client.head("/show/x")).content == b""
    assert server.statistics().num_requests == 8
    assert server.statistics().num_handler_failures == 0


async def test_an_application_that_fails_answers_and_the_failure_is_counted(serve_app: Any) -> None:
    server = await serve_app(app())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
        assert (await client.get("/fail")).status_code == 500
    assert server.statistics().num_handler_failures == 1


async def test_the_application_sees_the_response_end_as_a_disconnect_and_runs_its_background_task(
    serve_app: Any, until: Until
) -> None:
    ran: list[str] = []

    async def background() -> None:
        ran.append("background")

    async def answer(request: StarletteRequest) -> Response:
        response = PlainTextResponse("ok", background=BackgroundTask(background))
        assert not await request.is_disconnected()
        return response

    server = await serve_app(app(Route("/background", answer)))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
        assert (await client.get("/background")).text == "ok"
    await until(lambda: ran)


async def test_a_client_that_leaves_cancels_the_application(serve_app: Any, connect: Connect, until: Until) -> None:
    started, ended = asyncio.Event(), []

    async def wait(_: StarletteRequest) -> Response:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")
        return Response()

    server = await serve_app(app(Route("/wait", wait)))
    client = await connect(server)
    client.send(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
    await started.wait()
    await client.close()
    await until(lambda: ended)


async def test_an_application_sending_nonsense_is_a_failure(serve: Serve) -> None:
    async def nonsense(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.trailers"})

    async def handler(request: Request, responder: Responder) -> None:
        await serve_asgi(nonsense, request, responder)

    server = await serve(handler)
    async with httpx.AsyncClient(timeout=60) as client:
        assert (await client.get(f"http://127.0.0.1:{server.port}/")).status_code == 500
