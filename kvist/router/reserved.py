"""What tells an engine of other engines: where a prompt's KV is fetched from, which worker or rank computes it.

It makes a worker open connections, write into a cache that all share, or leave its place in the balance, so that the
router alone says it. Whatever a client says of it is refused, whether its worker would understand it or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from kvist.http import Headers
from kvist.openai.errors import RequestError

FIELDS = frozenset(
    {
        # vLLM
        "kv_transfer_params",
        "ec_transfer_params",
        # SGLang
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "decode_tp_size",
        "data_parallel_rank",
        "data_parallel_rank_decode",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "pd_prefill_admission_ack",
        "decode_token_reservation_id",
        # TensorRT-LLM
        "disaggregated_params",
        # Dynamo's workers, in `nvext`
        "backend_instance_id",
        "prefill_worker_id",
        "decode_worker_id",
        "dp_rank",
        "prefill_dp_rank",
    }
)
"""Fields of a body, by the dialect that has them."""

CONTAINERS = frozenset({"vllm_xargs", "extra_args", "extra_body", "sampling_params", "custom_params", "nvext"})
"""Fields whose content engines take as their own: looked through as deep as it goes."""

HEADERS = frozenset(
    {
        b"x-data-parallel-rank",  # vLLM and SGLang
        b"x-data-parallel-host-port",  # llm-d's sidecar, as those below
        b"x-prefiller-host-port",
        b"x-prefiller-url",
        b"x-encoder-hosts-ports",
        b"x-worker-instance-id",  # Dynamo
        b"x-prefill-instance-id",
        b"x-dp-rank",
    }
)

MAX_REQUEST_ID_CHARS = 128

_REQUEST_ID = re.compile(rf"[\x20-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}")
_ADDRESSES = ("prefill_addr_", "decode_addr_")
"""By these, connectors of vLLM find in a request's id where the other worker listens."""

_PART = re.compile(
    rb'(?i)content-disposition:[ \t]*form-data;[ \t]*name="([\w.\[\]-]+)"'
    rb'(?:;[ \t]*filename(?:="[^"\\\r\n]*"|\*=[\w%\'.-]+))*\r\n(?![ \t])'
)
_PART_FIELD = re.compile(rb"(?i)content-disposition")
_FORM = re.compile(rb"(?i)multipart/form-data[ \t]*;.*boundary=.+")


def refuse_fields(fields: Mapping[str, Any]) -> None:
    """Raise RequestError (400) if a client's body says where it is to be computed."""
    for name in FIELDS.intersection(fields):
        raise _refusal(name)
    for container in CONTAINERS.intersection(fields):
        for name in _names(fields[container]):
            if name in FIELDS:
                raise _refusal(f"{container}: {name}")
    if isinstance(request_id := fields.get("request_id"), str):
        check_request_id("request_id", request_id)


def refuse_headers(headers: Headers) -> None:
    """Raise RequestError (400) if a client's headers do."""
    for name, _ in headers:
        if name.replace(b"_", b"-") in HEADERS:
            raise _refusal(name.decode("latin-1"))


def refuse_form(content_type: bytes, body: bytes) -> None:
    """Raise RequestError (400) unless the body is a form with plain names for its parts, none of them such a field."""
    if not _FORM.fullmatch(content_type):
        raise RequestError(HTTPStatus.BAD_REQUEST, "content-type: expected multipart/form-data with a boundary")
    parts = {match.start(): match[1] for match in _PART.finditer(body)}
    for field in _PART_FIELD.finditer(body):
        if field.start() not in parts:
            raise RequestError(HTTPStatus.BAD_REQUEST, 'body: expected every part as form-data; name="…"')
    for name in parts.values():
        for word in re.findall(r"\w+", name.decode("latin-1")):
            if word in FIELDS or word in CONTAINERS:
                raise _refusal(word)


def check_request_id(name: str, value: str) -> None:
    """Raise RequestError (400) unless it may stand in log lines and names no other worker."""
    if not _REQUEST_ID.fullmatch(value):
        expected = f"1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters"
        raise RequestError(HTTPStatus.BAD_REQUEST, f"{name}: got {value!r:.100}, expected {expected}", param=name)
    if any(address in value for address in _ADDRESSES):
        raise _refusal(name)


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _names(inner)


def _refusal(name: str) -> RequestError:
    message = f"{name}: expected none, for the router chooses the workers"
    return RequestError(HTTPStatus.BAD_REQUEST, message, param=name.rpartition(" ")[2])
