"""Serves the live page at `/ui`: its files, which hold no data, to anybody, and a stream of data to administrators.

    GET /ui, /ui/…       the page, its styles and scripts (`kvist/router/page/`)
    GET /ui/state        the data of a view (`live`)
    GET /ui/events       the same as server-sent events, as it changes

The page may load nothing from other hosts, run no inline scripts, and not be embedded in other pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs, urlencode

import msgspec

import kvist.router
from kvist.http import Headers, Request, Responder
from kvist.openai.errors import RequestError
from kvist.router.doors.keeper import Answer, Question
from kvist.router.doors.live import STATE_PATH

UI_PATH, EVENTS_PATH = "/ui", "/ui/events"
INTERVAL_S = 0.25
"""How often a viewer gets what has changed."""

_FOLDER = Path(kvist.router.__file__).parent / "page"
_TYPES = {".html": b"text/html", ".css": b"text/css", ".js": b"text/javascript", ".svg": b"image/svg+xml"}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Headers = [
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class _Head(msgspec.Struct):
    number: int


@cache
def _files() -> dict[str, tuple[bytes, Headers]]:
    """Return the page's files by path, each with its headers."""
    files = {}
    for file in _FOLDER.iterdir():
        if file.suffix in _TYPES:
            body = file.read_bytes()
            tag = b'"%b"' % sha256(body).hexdigest()[:32].encode()
            headers = [(b"content-type", _TYPES[file.suffix] + b"; charset=utf-8"), (b"etag", tag), *_HEADERS]
            path = UI_PATH if file.name == "index.html" else f"{UI_PATH}/{file.name}"
            files[path] = body, [*headers, (b"cache-control", b"no-cache")]
    return files


def show_file(request: Request, responder: Responder) -> None:
    """Answer with a file of the page; raises RequestError if there is no such file."""
    if request.method not in ("GET", "HEAD"):
        message = f"{request.method} {request.path}: expected GET or HEAD"
        raise RequestError(HTTPStatus.METHOD_NOT_ALLOWED, message, allowed_methods=("GET", "HEAD"))
    body, headers = _files().get(request.path, (None, []))
    if body is None:
        raise RequestError(HTTPStatus.NOT_FOUND, f"{request.path[:200]}: there is no such file")
    if request.header(b"if-none-match") == dict(headers)[b"etag"]:
        responder.answer(HTTPStatus.NOT_MODIFIED, headers)
    else:
        responder.answer(HTTPStatus.OK, headers, body)


async def stream(
    request: Request, responder: Responder, ask: Callable[[Question], Awaitable[Answer]], check: Callable[[], None]
) -> None:
    """Send what has changed, for as long as the client listens and `check` raises no RequestError."""
    asked = {name: values[-1] for name, values in parse_qs(request.query).items()}
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), *_HEADERS]
    responder.start(HTTPStatus.OK, headers)
    while True:
        answer = await ask(Question("GET", f"{STATE_PATH}?{urlencode(asked)}", [], b"", None))
        name = b"state"
        if answer.status == HTTPStatus.OK:
            asked["since"] = str(msgspec.json.decode(answer.body, type=_Head).number)
        else:
            name = b"refused"
        await responder.write(b"event: %b\ndata: %b\n\n" % (name, answer.body))
        await asyncio.sleep(INTERVAL_S)
        try:
            check()
        except RequestError:
            break
    responder.end()
