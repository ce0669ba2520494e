"""The `kv_transfer_params` of vLLM's connectors such as NIXL's (read in 0.33.0, run in 0.32.0), and of Kvist's workers.

The prefill worker computes the prompt and one token, keeps the blocks, and answers with params that name them. The
decode worker gets the client's request with those params, fetches the blocks, and samples the first token itself.
Kvist's prefill workers send the params once they have begun, and its decode workers fetch blocks as they are computed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvist.openai.requests import Fields
from kvist.router.prefill.dialect import Dialect, Handoff
from kvist.router.prompts import ParsedRequest

_ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}


class _Params(msgspec.Struct, frozen=True):
    do_remote_prefill: Literal[True]
    num_tokens: int = 0


class _Answer(msgspec.Struct, frozen=True):
    kv_transfer_params: msgspec.Raw


class VllmDialect(Dialect):
    """Has the prefill worker compute one token, and passes its params on unchanged."""

    hands_logprobs = True
    checks_fetches = False
    """Whether a prefill worker refuses to hand over blocks that it has freed."""

    def begin(self, parsed: ParsedRequest, *_: object) -> tuple[Fields, Handoff | None]:
        """Ask for one token, not as a stream, and for the blocks to be kept."""
        fields: Fields = {"stream": False, "max_tokens": 1, "kv_transfer_params": _ASKED}
        overridden = {"max_completion_tokens": 1, "min_tokens": 1, "stream_options": None}
        return fields | {name: value for name, value in overridden.items() if parsed.fields.get(name)}, None

    def read_handoff(self, _parsed: ParsedRequest, answer: bytes) -> Handoff | None:
        """Return the params unchanged."""
        try:
            params = msgspec.json.decode(answer, type=_Answer).kv_transfer_params
            read, fields = msgspec.json.decode(params, type=_Params), {"kv_transfer_params": params}
            return Handoff(fields, num_tokens=read.num_tokens, is_for_one=not self.checks_fetches)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


class KvistDialect(VllmDialect):
    """Hands the first token over with the blocks, so that it is not sampled twice; not its log probabilities.

    A worker can also hand over the leading blocks of a prompt that it has cached, and another computes the rest.
    """

    hands_logprobs = False
    checks_fetches = True
    hands_over_early = True

    def begin(self, parsed: ParsedRequest, *others: object) -> tuple[Fields, Handoff | None]:
        """Ask for one token, as a stream."""
        fields, handoff = super().begin(parsed, *others)
        return fields | {"stream": True}, handoff

    def ask_for_prefix(self, parsed: ParsedRequest, num_tokens: int) -> Fields:
        """Return what is set in the body for the worker that holds so many tokens, and is to compute nothing."""
        asked = {"do_remote_decode": True, "max_cached_tokens": num_tokens}
        return {**self.begin(parsed)[0], "kv_transfer_params": asked}

    def read_handoff(self, parsed: ParsedRequest, answer: bytes) -> Handoff | None:
        """Return the params in the first event of the stream, once that is complete."""
        event, end, _ = answer.partition(b"\n\n")
        return super().read_handoff(parsed, event.removeprefix(b"data: ")) if end else None
