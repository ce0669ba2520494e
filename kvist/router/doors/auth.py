"""Who may do what: clients need their keys (`tenants`), administrators another key or, if none is set, loopback.

A client may use the inference endpoints of vLLM, SGLang, TensorRT-LLM and the bundled engine. All other endpoints of a
worker (adapters, flushing, sleep, profiling) are for administrators. Decisions are made on a path's plain form, which
is also sent to the worker, so that it cannot read another path than the one that was allowed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from http import HTTPStatus
from posixpath import normpath
from urllib.parse import unquote

from kvist.http import Headers, Request
from kvist.openai.errors import RequestError
from kvist.router.prompts import CHAT_PATH, COMPLETION_PATH, FORM_PATHS, GENERATE_PATH
from kvist.router.reserved import refuse_headers

MODELS_PATH, METRICS_PATH = "/v1/models", "/metrics"
OPEN_PATHS = frozenset({"/health", "/readiness", METRICS_PATH})

_POSTED = FORM_PATHS | {
    *(CHAT_PATH, COMPLETION_PATH, "/v1/chat/completions/batch", GENERATE_PATH, "/encode"),
    *("/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/embeddings", "/v2/embed", "/v1/pooling", "/pooling"),
    *("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/v1/classify", "/classify"),
    *("/v1/decisions", "/v1/systemone", "/generative_scoring"),
    *("/v1/moderations", "/v1/audio/speech", "/v1/images/generations"),
    *("/v1/tokenize", "/v1/detokenize", "/tokenize", "/detokenize"),
}
_STORED_RESPONSE = re.compile(r"/v1/responses/[\w.-]+(/cancel)?", re.ASCII)
_PLAIN = re.compile(r"/[A-Za-z0-9\-._~!$&'()*+,;=:@/]*")
_FORM = re.compile(rb"(?i)multipart/form-data[ \t]*;.*boundary=.+")
_CHARSET = re.compile(rb"""(?i)charset[ \t]*=[ \t]*["']?([^;"' \t]*)""")


def plain_path(path: str) -> str:
    """Return the path decoded once, without dot segments, empty segments and a slash at its end.

    Raises RequestError (400) if it decodes to anything but a path's plain characters, or has an encoded slash: what
    such a path names depends on its reader.
    """
    if path in _POSTED:
        return path
    decoded = unquote(path, errors="replace")
    if "%2f" in path.lower() or not _PLAIN.fullmatch(decoded):
        expected = "plain characters, encoded once at most, and slashes as they are"
        raise RequestError(HTTPStatus.BAD_REQUEST, f"path: got {path[:200]!r}, expected {expected}")
    return normpath("/" + decoded.lstrip("/"))


def methods_of(path: str) -> tuple[str, ...] | None:
    """Return the methods that a client may use on a plain path, None if it may not use it at all."""
    if path in _POSTED:
        return ("POST",)
    if path == MODELS_PATH or path.startswith(MODELS_PATH + "/"):
        return ("GET", "HEAD")
    stored = _STORED_RESPONSE.fullmatch(path)
    return None if stored is None else ("POST",) if stored[1] else ("GET",)


def check_client_request(request: Request) -> None:
    """Raise RequestError unless a request to an inference endpoint has an allowed method and allowed headers."""
    methods = methods_of(request.path)
    assert methods is not None
    if request.method not in methods:
        message = f"{request.method} {request.path}: expected {' or '.join(methods)}"
        raise RequestError(HTTPStatus.METHOD_NOT_ALLOWED, message, allowed_methods=methods)
    refuse_headers(request.headers)
    content_type = _content_type(request.headers)
    if request.path in FORM_PATHS:
        if not _FORM.fullmatch(content_type):
            raise RequestError(HTTPStatus.BAD_REQUEST, "content-type: expected multipart/form-data with a boundary")
    elif (charset := _CHARSET.search(content_type)) and charset[1].lower() not in (b"utf-8", b"utf8", b"us-ascii"):
        got = f"{content_type.decode('latin-1')!r:.100}"
        raise RequestError(HTTPStatus.BAD_REQUEST, f"content-type: got {got}, expected charset utf-8")


def cors_headers(request: Request, origins: Collection[str]) -> Headers:
    """Return the headers that let a page of one of these origins read the answer in a browser."""
    origin = request.header(b"origin")
    if origin is None or not origins:
        return []
    if "*" in origins:
        return [(b"access-control-allow-origin", b"*")]
    allowed = [(b"access-control-allow-origin", origin)] if origin.decode("latin-1") in origins else []
    return [*allowed, (b"vary", b"origin")]


def preflight_headers(request: Request) -> Headers | None:
    """Return the headers that answer a browser's CORS preflight request; None if the request is none."""
    if request.method != "OPTIONS" or request.header(b"access-control-request-method") is None:
        return None
    methods = ", ".join(methods_of(request.path) or ()).encode()
    wanted = request.header(b"access-control-request-headers")
    headers = [(b"access-control-allow-methods", methods), (b"access-control-max-age", b"600")]
    return headers if wanted is None else [*headers, (b"access-control-allow-headers", wanted)]


def _content_type(headers: Headers) -> bytes:
    """Return the content type; raises RequestError if there are several, or if the body is compressed."""
    content_types = [value for name, value in headers if name == b"content-type"]
    if len(content_types) > 1:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"content-type: got {len(content_types)}, expected one")
    for name, value in headers:
        if name == b"content-encoding" and value.lower() != b"identity":
            got = f"{value.decode('latin-1')!r:.100}"
            raise RequestError(HTTPStatus.BAD_REQUEST, f"content-encoding: got {got}, expected none")
    return content_types[0] if content_types else b""


def is_administrator(request: Request, admin_key: str | None) -> bool:
    """Return whether the request bears the admin key or, where none is set, comes straight from loopback."""
    return request.is_direct_from_loopback() if admin_key is None else request.has_bearer_token(admin_key)


def require_administrator(request: Request, admin_key: str | None) -> None:
    """Raise RequestError (401, or 403 where no key is set) unless the request is an administrator's."""
    if is_administrator(request, admin_key):
        return
    what = f"{request.method} {request.path} is for administrators"
    if admin_key is not None:
        message = f"{what}: authorization: expected 'Bearer' and the admin key"
        raise RequestError(HTTPStatus.UNAUTHORIZED, message, code="invalid_admin_key")
    raise RequestError(HTTPStatus.FORBIDDEN, f"{what}: on loopback only, or with --admin-key", code="admin_forbidden")
