"""An ASGI 3 application answers on the router's own port; its request is whole, its response waits for the client."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

from kvist.http.fields import Headers, end_to_end
from kvist.http.request import Request
from kvist.http.responder import Responder

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


async def serve_asgi(app: AsgiApp, request: Request, responder: Responder, *, scheme: str = "http") -> None:
    """Runs `app` for one request (http only, no lifespan); what it raises is raised here."""
    await app(_scope(request, scheme), _Receive(request.body, finished := asyncio.Event()), _Send(responder, finished))


def _scope(request: Request, scheme: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": request.http_version,
        "method": request.method,
        "scheme": scheme,
        "path": unquote(request.path),
        "raw_path": request.path.encode("ascii"),
        "query_string": request.query.encode("ascii"),
        "root_path": "",
        "headers": request.headers,
        "client": request.client,
        "server": None,
    }


class _Receive:
    """Gives the body once, and `http.disconnect` when the response has ended; a client that leaves cancels the app."""

    __slots__ = ("_body", "_finished")

    def __init__(self, body: bytes, finished: asyncio.Event) -> None:
        self._body: bytes | None = body
        self._finished = finished

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._finished.wait()
        return {"type": "http.disconnect"}


class _Send:
    """Turns ASGI messages into a response; a body that comes in one message goes out with its length."""

    __slots__ = ("_finished", "_head", "_responder")

    def __init__(self, responder: Responder, finished: asyncio.Event) -> None:
        self._responder = responder
        self._finished = finished
        self._head: tuple[int, Headers] | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(bytes(name).lower(), bytes(value)) for name, value in message.get("headers", ())]
            self._head = message["status"], end_to_end(headers)
            return
        if message["type"] != "http.response.body":
            raise RuntimeError(f"unexpected ASGI message {message['type']!r}")
        body, more_body = bytes(message.get("body", b"")), message.get("more_body", False)
        if self._head is not None:
            (status, headers), self._head = self._head, None
            has_length = any(name == b"content-length" for name, _ in headers)
            if not more_body and not has_length:
                headers.append((b"content-length", b"%d" % len(body)))
            self._responder.start(status, headers)
        await self._responder.write(body)
        if not more_body:
            await self._responder.finish()
            self._finished.set()
