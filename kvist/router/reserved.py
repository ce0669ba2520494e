"""Fields and headers that only the router may send to engines: where a prompt's KV is, and which worker computes it.

They make a worker open connections, write into a shared cache, or take a request that was balanced elsewhere. Requests
of clients that have any of them are refused, whether the worker would understand it or not.
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
        *("kv_transfer_params", "ec_transfer_params"),
        # SGLang
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),
        *("data_parallel_rank", "data_parallel_rank_decode", "routed_dp_rank", "disagg_prefill_dp_rank"),
        *("pd_prefill_admission_ack", "decode_token_reservation_id"),
        # TensorRT-LLM
        "disaggregated_params",
        # Dynamo's workers, in `nvext`
        *("backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank"),
    }
)
"""Fields of a body, by engine."""

CONTAINERS = frozenset({"vllm_xargs", "extra_args", "extra_body", "sampling_params", "custom_params", "nvext"})
"""Fields whose content engines treat as fields of their own: they are searched at any depth."""

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
"""After these in a request's id, connectors of vLLM find the address of the other worker."""

_PART = re.compile(
    rb'(?i)content-disposition:[ \t]*form-data;[ \t]*name="([\w.\[\]-]+)"'
    rb'(?:;[ \t]*filename(?:="[^"\\\r\n]*"|\*=[\w%\'.-]+))*\r\n(?=[^ \t])'
)
_PART_FIELD = b"content-disposition"
_MODEL = re.compile(rb"(?:[\w-]+:[^\r\n]*\r\n)*\r\n([^\r\n]{1,256})\r\n--")
"""The rest of a part after the field with its name, if the part is a model's name."""
_MAX_PARTS = 256
_MAX_PART_FIELD_BYTES = 4096
_SLICE_BYTES = 2**20


def refuse_fields(fields: Mapping[str, Any]) -> None:
    """Raise RequestError (400) if a client's body has a reserved field."""
    for name in FIELDS.intersection(fields):
        raise _refusal(name)
    for container in CONTAINERS.intersection(fields):
        for name in _names(fields[container]):
            if name in FIELDS:
                raise _refusal(f"{container}: {name}")
    if isinstance(request_id := fields.get("request_id"), str):
        check_request_id("request_id", request_id)


def refuse_headers(headers: Headers) -> None:
    """Raise RequestError (400) if a client's headers have a reserved one."""
    for name, _ in headers:
        if name.replace(b"_", b"-") in HEADERS:
            raise _refusal(name.decode("latin-1"))


def model_in_form(body: bytes) -> slice | None:
    """Return where in a form its model's name is, None if it has none.

    Raises RequestError (400) unless its parts have plain names, no reserved one, and at most one is a model.
    """
    model = None
    for number, start in enumerate(_part_fields(body), 1):
        part = _PART.match(body, start, start + _MAX_PART_FIELD_BYTES)
        if part is None or number > _MAX_PARTS:
            expected = f'{_MAX_PARTS} parts at most, each as form-data; name="…"'
            raise RequestError(HTTPStatus.BAD_REQUEST, f"body: expected {expected}")
        for word in re.findall(r"\w+", part[1].decode("latin-1")):
            if word in FIELDS or word in CONTAINERS:
                raise _refusal(word)
        if part[1] == b"model":
            value = _MODEL.match(body, part.end(), part.end() + _MAX_PART_FIELD_BYTES)
            if value is None or model is not None:
                message = "model: expected one part, of one line of up to 256 bytes"
                raise RequestError(HTTPStatus.BAD_REQUEST, message, param="model")
            model = slice(*value.span(1))
    return model


def _part_fields(body: bytes) -> Iterator[int]:
    """Yield where the fields are that name a form's parts; other threads may run between two slices of it."""
    for begin in range(0, len(body), _SLICE_BYTES):
        piece = body[begin : begin + _SLICE_BYTES + len(_PART_FIELD) - 1].lower()
        start = piece.find(_PART_FIELD)
        while start >= 0:
            yield begin + start
            start = piece.find(_PART_FIELD, start + 1)


def check_request_id(name: str, value: str) -> None:
    """Raise RequestError (400) unless the id is safe in log lines and has no worker's address."""
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
