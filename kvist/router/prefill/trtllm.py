"""TensorRT-LLM's `disaggregated_params`, as its own disaggregated server sends them (main, 2026-11).

The context worker gets the request as `context_only` and answers with params, the first token among them, and with the
prompt's tokens; the generation worker gets both, as `generation_only`, and answers with that token first.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from kvist.openai.requests import Fields
from kvist.router.prefill.dialect import Dialect, Handoff, Side
from kvist.router.prompts import CHAT_PATH, ParsedRequest

_FIRST_ID, _LAST_ID = 2**42, 2**63 - 1
"""Workers number their own requests below these."""
_GENERATION = {"request_type": "generation_only"}


class _Choice(msgspec.Struct, frozen=True):
    disaggregated_params: dict[str, Any]
    finish_reason: str | None = None


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")


class TrtllmDialect(Dialect):
    """Hands the first token over; its log probabilities only in some releases."""

    def begin(
        self, parsed: ParsedRequest, _prefill: Side, _decode: Side, random: Random
    ) -> tuple[Fields, Handoff | None]:
        """Ask for the context only, under a random number by which the two workers know the request."""
        params = {"request_type": "context_only", "disagg_request_id": random.randint(_FIRST_ID, _LAST_ID)}
        fields: Fields = {"stream": False, "disaggregated_params": params}
        return fields | ({"stream_options": None} if "stream_options" in parsed.fields else {}), None

    def read_handoff(self, parsed: ParsedRequest, answer: bytes) -> Handoff | None:
        """Return the params and the prompt's tokens; None for an answer that already ended with its first token."""
        try:
            read = msgspec.json.decode(answer, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if len(read.choices) != 1 or read.choices[0].finish_reason not in ("length", "not_finished"):
            return None
        fields: Fields = {"disaggregated_params": read.choices[0].disaggregated_params | _GENERATION}
        if bytes(read.prompt_token_ids) != b"null":
            fields["prompt_token_ids" if parsed.path == CHAT_PATH else "prompt"] = read.prompt_token_ids
        return Handoff(fields)
