"""SGLang's protocol, in which a pair of workers meets in a "room" (read in 0.5.23).

Both workers get the request at once, and with it the address at which the prefill worker listens for decode workers and
a room number for each prompt. The decode worker answers, beginning with the token that the other one sampled; the
log probabilities of a prompt are in the prefill worker's answer alone. Neither does anything without the other.
"""

from __future__ import annotations

import logging
from random import Random
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvist.openai.requests import Fields
from kvist.router.prefill.dialect import Dialect, Handoff, LocalReason, Side, wants_logprobs
from kvist.router.prompts import APIS, COMPLETION_PATH, GENERATE_PATH, ParsedRequest

logger = logging.getLogger(__name__)

DEFAULT_BOOTSTRAP_PORT = 8998

_PLACE = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_NUM_ROOMS = 2**63
_GENERATING = frozenset(
    {*APIS, "/v1/score", "/v1/rerank", "/v1/decisions", "/v1/systemone", "/v1/audio/transcriptions"}
)
"""Endpoints that SGLang serves by generating, if only log probabilities: a worker with a role needs a room for that."""
_INPUT_LOGPROBS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


class SglangDialect(Dialect):
    """Pairs do any generation with one answer to each prompt: for several, a worker would look in one room."""

    def works_alone(self, path: str) -> bool:
        """Return whether the endpoint generates nothing."""
        return path not in _GENERATING

    def obstacle(self, parsed: ParsedRequest) -> LocalReason | None:
        """Return why no pair can do the request: several answers, or log probabilities that cannot be merged."""
        path = parsed.path
        if path not in APIS:
            return LocalReason.OTHER_ENDPOINT
        sampling = parsed.fields.get("sampling_params") if path == GENERATE_PATH else parsed.fields
        if any(isinstance(each, dict) and each.get("n") not in (None, 1) for each in _each(sampling)):
            return LocalReason.SEVERAL_SEQUENCES
        is_echoed = path == COMPLETION_PATH and parsed.fields.get("echo")
        return LocalReason.LOGPROBS if is_echoed and wants_logprobs(parsed) else None

    def begin(
        self, parsed: ParsedRequest, prefill: Side, decode: Side, random: Random
    ) -> tuple[Fields, Handoff | None]:
        """Choose new rooms; in a prefill worker of several ranks the room's number selects the rank."""
        host = urlsplit(prefill.url).hostname or ""
        host, num_ranks = f"[{host}]" if ":" in host else host, prefill.num_ranks
        rooms = (random.randrange(_NUM_ROOMS // num_ranks) * num_ranks for _ in range(parsed.num_prompts))
        places = [(host, prefill.bootstrap_port, room + (prefill.rank or 0)) for room in rooms]
        place: Fields = dict(zip(_PLACE, zip(*places, strict=True) if len(places) > 1 else places[0], strict=True))
        is_merged = parsed.path == GENERATE_PATH and bool(parsed.fields.get("return_logprob"))
        is_merged = is_merged and parsed.fields.get("logprob_start_len") not in (None, -1)
        prefill_fields = place | _rank_field("data_parallel_rank", prefill) | ({"stream": False} if is_merged else {})
        decode_fields = (
            place | _rank_field("disagg_prefill_dp_rank", prefill) | _rank_field("data_parallel_rank", decode)
        )
        return prefill_fields, Handoff(decode_fields, is_merged=is_merged)


def _rank_field(name: str, side: Side) -> Fields:
    return {} if side.rank is None else {name: side.rank}


def with_input_logprobs(answer: bytes, prefilled: bytes) -> bytes:
    """Return the decode worker's whole answer with the prompts' log probabilities from the prefill worker's.

    An answer that is not one of `/generate` is returned as it is.
    """
    try:
        metas = [each["meta_info"] for each in _each(msgspec.json.decode(prefilled))]
        if not answer.startswith(b"data:"):
            read = msgspec.json.decode(answer)
            for index, each in enumerate(_each(read)):
                _put(metas[index], each["meta_info"])
            return msgspec.json.encode(read)
        events = answer.split(b"\n\n")
        for place, event in enumerate(events):
            if event.startswith(b"data: {"):
                read = msgspec.json.decode(event[6:])
                _put(metas[read.get("index", 0)], read["meta_info"])
                events[place] = b"data: " + msgspec.json.encode(read)
        return b"\n\n".join(events)
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError) as error:
        logger.warning("log probabilities of a prompt are not in its answer reason=%r", error)
        return answer


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _put(prefilled: dict[str, Any], decoded: dict[str, Any]) -> None:
    for name in _INPUT_LOGPROBS:
        if name in prefilled and name in decoded:
            decoded[name] = [*(prefilled[name] or ()), *(decoded[name] or ())]
