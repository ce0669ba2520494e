"""SGLang's pairs, which meet in a room (read in 0.5.23).

Both workers get the request at once, and with it where the prefill worker listens for decode workers and a number that
both share, one a prompt. The decode worker answers, beginning with the token that the other one sampled; the
log probabilities of a prompt are in the prefill worker's answer alone. Neither does anything without the other.
"""

from __future__ import annotations

from random import Random
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvist.openai.requests import Fields
from kvist.router.prefill.dialect import Dialect, Handoff, Local, Side, wants_logprobs
from kvist.router.prompts import APIS, COMPLETION_PATH, GENERATE_PATH, Ask

DEFAULT_BOOTSTRAP_PORT = 8998

_NUM_ROOMS = 2**63
_INPUT_LOGPROBS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


class SglangDialect(Dialect):
    """Any generation with one answer to each prompt: several, a worker would look for in one room."""

    works_alone = False

    def obstacle(self, path: str, ask: Ask) -> Local | None:
        """Refuse several answers to a prompt, and log probabilities of prompts where there is no place to put them."""
        if path not in APIS:
            return Local.OTHER_ENDPOINT
        sampling = ask.fields.get("sampling_params") if path == GENERATE_PATH else ask.fields
        for params in sampling if isinstance(sampling, list) else [sampling]:
            if isinstance(params, dict) and (
                params.get("n") not in (None, 1) or params.get("best_of") not in (None, 1)
            ):
                return Local.SEVERAL_SEQUENCES
        is_echoed = path == COMPLETION_PATH and ask.fields.get("echo")
        return Local.LOGPROBS if is_echoed and wants_logprobs(ask) else None

    def begin(self, path: str, ask: Ask, prefill: Side, decode: Side, random: Random) -> tuple[Fields, Handoff | None]:
        """Send both to new rooms: a prefill worker of several ranks takes the one that the room's number names."""
        host = urlsplit(prefill.url).hostname or ""
        num_ranks, rank = prefill.num_ranks, prefill.rank or 0
        rooms = [random.randrange(_NUM_ROOMS // num_ranks) * num_ranks + rank for _ in range(ask.num_prompts)]
        place: Fields = {
            "bootstrap_host": f"[{host}]" if ":" in host else host,
            "bootstrap_port": prefill.bootstrap_port,
        }
        if ask.num_prompts > 1:
            place = {name: [value] * ask.num_prompts for name, value in place.items()}
        place["bootstrap_room"] = rooms if ask.num_prompts > 1 else rooms[0]
        is_merged = path == GENERATE_PATH and _wants_input_logprobs(ask)
        asked = place | _rank_field("data_parallel_rank", prefill) | ({"stream": False} if is_merged else {})
        told = place | _rank_field("disagg_prefill_dp_rank", prefill) | _rank_field("data_parallel_rank", decode)
        return asked, Handoff(told, is_merged=is_merged)


def _rank_field(name: str, side: Side) -> Fields:
    return {} if side.rank is None else {name: side.rank}


def _wants_input_logprobs(ask: Ask) -> bool:
    return bool(ask.fields.get("return_logprob")) and ask.fields.get("logprob_start_len") not in (None, -1)


def with_input_logprobs(answer: bytes, prefilled: bytes) -> bytes:
    """Return the decode worker's whole answer with the log probabilities of its prompts from the prefill worker's.

    Raises msgspec.DecodeError, LookupError or TypeError where these are not answers of `/generate`.
    """
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


def _each(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else [answer]


def _put(prefilled: dict[str, Any], decoded: dict[str, Any]) -> None:
    for name in _INPUT_LOGPROBS:
        if name in prefilled and name in decoded:
            decoded[name] = [*(prefilled[name] or ()), *(decoded[name] or ())]
