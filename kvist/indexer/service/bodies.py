"""The API's JSON: request bodies, with errors that name field, value and what was expected, and answers to queries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from http import HTTPStatus
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvist.errors import InvalidValueError
from kvist.events import WorkerRank
from kvist.events.codec import DECODE_ERRORS
from kvist.events.types import MAX_RANKS
from kvist.indexer.compiled.hashing import token_array
from kvist.indexer.compiled.json_tokens import MARK, split_token_ids
from kvist.indexer.service.config import MAX_INSTANCE_ID
from kvist.indexer.service.registry import ApiError, Namespace
from kvist.radix import Match

DEFAULT_GROUP = "default"
MAX_NAME_LENGTH = 1024
_MAX_SHOWN = 80

_Name = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]
_InstanceId = Annotated[int, Meta(ge=0)]  # msgspec knows no larger bound than 2**63 - 1
_Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]

_EXPECTED = {
    "instance_id": "an integer from 0 to 2**64 - 1",
    "dp_rank": f"an integer from 0 to {MAX_RANKS - 1}",
    "block_size": "an integer from 1 to 65536",
    "token_ids": "an array of integers from 0 to 2**32 - 1",
    "whole_prompt": "true or false",
    "block_hashes": "an array of integers of 64 bits, signed or unsigned",
}
_EXPECTED_STRING = f"a string of at most {MAX_NAME_LENGTH} characters"


class _Scoped(msgspec.Struct):
    """The namespace, which every body names; a tenant is another word for a routing group."""

    model_name: _Name
    routing_group: _Name | None = None
    tenant_id: _Name | None = None

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.model_name, self.routing_group or self.tenant_id or DEFAULT_GROUP)


class RegisterBody(_Scoped, kw_only=True):
    """`POST /register`."""

    instance_id: _InstanceId
    endpoint: _Name
    block_size: Annotated[int, Meta(ge=1, le=65536)]
    dp_rank: _Rank = 0
    replay_endpoint: _Name | None = None


class UnregisterBody(_Scoped, kw_only=True):
    """`POST /unregister`; without a rank, all ranks of the instance."""

    instance_id: _InstanceId
    dp_rank: _Rank | None = None


class QueryBody(_Scoped, kw_only=True):
    """`POST /query`."""

    token_ids: list[int]
    lora_name: _Name | None = None
    cache_salt: _Name | None = None
    whole_prompt: bool = False


class HashQueryBody(_Scoped, kw_only=True):
    """`POST /query_by_hash`."""

    block_hashes: list[int]


class _Held(msgspec.Struct, gc=False):
    """The leading tokens of a prompt that an instance holds."""

    longest_matched: int
    gpu: int
    dp: dict[int, int]
    cpu: int
    disk: int


class _Answer(msgspec.Struct, gc=False):
    """The answer to a query; docs/index-service.md has an example."""

    scores: dict[str, dict[int, int]]
    instances: dict[str, _Held]
    frequencies: tuple[()] = ()
    """Always empty: clients expect the field."""


_Body = TypeVar("_Body", bound=_Scoped)
_Instanced = TypeVar("_Instanced", RegisterBody, UnregisterBody)


def read_register(body: bytes) -> RegisterBody:
    return _with_instance(_read(_register_decoder, body))


def read_unregister(body: bytes) -> UnregisterBody:
    return _with_instance(_read(_unregister_decoder, body))


def read_query(body: bytes) -> tuple[QueryBody, NDArray[np.uint32]]:
    """Return the body of `POST /query` and its tokens; raises ApiError."""
    if (split := split_token_ids(body, b"token_ids")) is not None and split.ends is None:
        with suppress(*DECODE_ERRORS):
            query = _query_decoder.decode(split.rest)
            if query.token_ids == [MARK]:
                return query, split.token_ids
    query = _read(_query_decoder, body)
    try:
        return query, token_array(query.token_ids)
    except InvalidValueError as error:
        _refuse_item("token_ids", query.token_ids, error.value)


def read_hash_query(body: bytes) -> tuple[HashQueryBody, list[int]]:
    """Return the body of `POST /query_by_hash` and its hashes; raises ApiError."""
    query = _read(_hash_query_decoder, body)
    wrong = next((value for value in query.block_hashes if not -(1 << 63) <= value < 1 << 64), None)
    if wrong is not None:
        _refuse_item("block_hashes", query.block_hashes, wrong)
    return query, [value % (1 << 64) for value in query.block_hashes]  # Dynamo's clients send i64


def encode_answer(matches: Iterable[Match], block_size: int, resyncing: AbstractSet[WorkerRank]) -> bytes:
    """Encode the answer to a query: the tokens that each instance holds, by tier, each tier with the faster ones.

    The matches' workers have names of `stream_name`. Ranks that are `resyncing` are left out.
    Of several streams with the same rank, and of several matches, the longest overlap counts.
    """
    instances: dict[str, _Held] = {}
    for match in matches:
        for source, (gpu, cpu, _, longest) in zip(match.ranks, (match.depths * block_size).tolist(), strict=True):
            if resyncing and source in resyncing:
                continue
            name, rank = source.worker.partition(":")[0], source.rank
            held = instances.get(name)
            if held is None:
                instances[name] = _Held(longest, gpu, {rank: gpu}, cpu, longest)
                continue
            held.longest_matched = held.disk = max(held.disk, longest)
            held.gpu, held.cpu = max(held.gpu, gpu), max(held.cpu, cpu)
            held.dp[rank] = max(held.dp.get(rank, 0), gpu)
    scores = {
        name: held.dp if all(held.dp.values()) else {rank: gpu for rank, gpu in held.dp.items() if gpu}
        for name, held in instances.items()
        if held.gpu
    }
    return _encode(_Answer(scores, instances))


_register_decoder = msgspec.json.Decoder(RegisterBody)
_unregister_decoder = msgspec.json.Decoder(UnregisterBody)
_query_decoder = msgspec.json.Decoder(QueryBody)
_hash_query_decoder = msgspec.json.Decoder(HashQueryBody)
_encode = msgspec.json.Encoder().encode


def _read(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        _explain(body, str(error))
    except DECODE_ERRORS as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"body: not JSON ({error})") from None


def _with_instance(body: _Instanced) -> _Instanced:
    if body.instance_id > MAX_INSTANCE_ID:
        _refuse("instance_id", body.instance_id)
    return body


def _explain(body: bytes, reason: str) -> NoReturn:
    """Raise the error for JSON of a wrong shape; `reason` is msgspec's, which says where."""
    try:
        value: Any = msgspec.json.decode(body)
    except DECODE_ERRORS as error:  # the wrong type came first, and no JSON after it
        raise ApiError(HTTPStatus.BAD_REQUEST, f"body: not JSON ({error})") from None
    if missing := re.search(r"missing required field `(\w+)`", reason):
        raise ApiError(HTTPStatus.UNPROCESSABLE_ENTITY, f"{missing[1]}: missing, expected {_expected(missing[1])}")
    path = re.search(r"at `\$\.(\w+)(?:\[(\d+)\])?", reason)
    if path is None:
        raise ApiError(HTTPStatus.UNPROCESSABLE_ENTITY, f"body: got {_shown(value)}, expected an object")
    value = value[path[1]]
    if path[2] is not None:
        _refuse(path[1], value[int(path[2])], f"[{path[2]}]")
    _refuse(path[1], value)


def _refuse(field: str, value: Any, place: str = "") -> NoReturn:
    message = f"{field}{place}: got {_shown(value)}, expected {_expected(field)}"
    raise ApiError(HTTPStatus.UNPROCESSABLE_ENTITY, message)


def _refuse_item(field: str, values: list[Any], wrong: Any) -> NoReturn:
    _refuse(field, wrong, f"[{values.index(wrong)}]" if wrong in values else "")


def _expected(field: str) -> str:
    return _EXPECTED.get(field, _EXPECTED_STRING)


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"an {'array' if isinstance(value, list) else 'object'} of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
