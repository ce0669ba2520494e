"""A request for several answers, split into one request for each, whose answers are put together into one.

What a prefill worker holds of a prompt is for one sequence, whatever its engine. So a request for n answers to each of
m prompts is split into m x n requests, each of which is routed on its own, to a pair or to one worker; a prefill worker
finds in its cache what it has computed for another of them. Choices are numbered as engines do, those of a prompt side
by side; each answer to a prompt has a seed of its own, as in vLLM; and usage counts a prompt once.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from kvist.events import WorkerRank
from kvist.http import Headers, Responder
from kvist.openai.errors import RequestError, error_event
from kvist.openai.requests import Fields, with_fields, without_field
from kvist.openai.responses import DONE, encode_event
from kvist.router.policy.decision import Decision
from kvist.router.prefill.dialect import MAX_KEPT_BYTES
from kvist.router.prompts import CHAT_PATH, COMPLETION_PATH, ParsedRequest
from kvist.router.usage import ReportedUsage

if TYPE_CHECKING:
    from kvist.router.forward import Forwarding

MAX_ANSWERS = 128
"""How many requests one may be split into: vLLM's bound of `n`."""

_decode = msgspec.json.Decoder(Fields).decode


def single_answer(parsed: ParsedRequest) -> ParsedRequest | None:
    """Return the one of the split requests that has the longest prompt; None where a request cannot be split.

    With beams or `best_of` one worker has to choose among the answers; `continuous_usage_stats` wants the usage of all
    answers in each chunk; and what a seed that is no integer means is the worker's to say.
    """
    fields, num_answers = parsed.fields, parsed.fields.get("n") or 1
    if parsed.path not in (CHAT_PATH, COMPLETION_PATH) or fields.get("best_of") not in (None, 1):
        return None
    if type(num_answers) is not int or not 1 < num_answers * parsed.num_prompts <= MAX_ANSWERS:
        return None
    has_running_usage = (fields.get("stream_options") or {}).get("continuous_usage_stats")
    if fields.get("use_beam_search") or has_running_usage or type(fields.get("seed") or 0) is not int:
        return None
    num_tokens = parsed.num_tokens // parsed.num_prompts if parsed.token_ids is None else len(parsed.token_ids)
    return msgspec.structs.replace(parsed, fields={**fields, "n": 1}, num_prompts=1, num_tokens=num_tokens)


def split_bodies(parsed: ParsedRequest, body: bytes) -> list[bytes]:
    """Return the bodies of the requests, in the order of their choices."""
    seed, prompts = parsed.fields.get("seed"), [Fields()]
    if parsed.num_prompts > 1:
        whole = msgspec.json.decode(body, type=_Batch)  # token ids may be in the body alone
        body = without_field(body, parsed.fields, "prompt")
        prompts = [{"prompt": prompt} for prompt in whole.prompt]
    num_answers = parsed.fields.get("n") or 1
    seeds = [{"seed": _seed_of(seed, idx)} if seed is not None else {} for idx in range(num_answers)]
    return [with_fields(body, {"n": 1} | prompt | each) for prompt in prompts for each in seeds]


def _seed_of(first: int, idx: int) -> int:
    """Return the seed of an answer to a prompt; past what workers take, 63 or 64 bits, seeds begin again at 0."""
    past = next((bound for bound in (2**63, 2**64) if first < bound <= first + idx), 0)
    return first + idx - past


class _Batch(msgspec.Struct):
    prompt: list[msgspec.Raw]


class _Answer(msgspec.Struct):
    choices: list[Fields] | None = None
    usage: Fields | None = None


class SplitPart(Responder):
    """Collects the answer to one of the requests."""

    request: Forwarding

    def __init__(self, split: SplitAttempt, choice_idx: int) -> None:
        self._split, self._choice_idx = split, choice_idx
        self.status: int | None = None
        self.headers: Headers = []
        self.kept = b""
        """The bytes that were not sent on to the client yet."""
        self.usage: Fields | None = None
        self.charged = ReportedUsage(0, 0, 0)
        self.is_running = True

    @property
    def prefill_rank(self) -> WorkerRank | None:
        """Return who computes the prompt for its first answer; None for that one, and where it is not known yet."""
        first = self._split.parts[self._choice_idx // self._split.num_answers * self._split.num_answers]
        computed_by = first.request.computed_by
        return None if computed_by is None else computed_by.chosen.target

    def start(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers

    def send(self, piece: bytes) -> None:
        """Keep the next bytes, and send on the whole events among them."""
        self.kept += piece
        self._split.on_data(self)

    def end(self) -> None:
        """Do nothing: `on_end` follows, which also says whether the request has failed."""

    break_off = cut = end

    def on_end(self, charged: ReportedUsage | None, error: Exception | None) -> None:
        """Report that the request has ended, once."""
        self.charged = charged or self.charged
        if self.is_running:
            self.is_running = False
            self._split.on_end(self, error)

    def read(self, data: bytes) -> Fields:
        """Return an answer, or a chunk of one, with its choice's number; keep its usage. Raises DecodeError."""
        fields = _decode(data)
        read = msgspec.convert(fields, _Answer)
        self.usage = read.usage or self.usage
        if read.choices is not None:
            fields["choices"] = [choice | {"index": self._choice_idx} for choice in read.choices]
        return fields


class SplitAttempt:
    """Answers a request by several others, in the place of an `AnswerAttempt`; all fail with the first that fails."""

    first_byte_s: float | None = None
    _has_begun = False
    _has_sent_error = False

    def __init__(self, owner: Forwarding, decision: Decision) -> None:
        """Send the owner's client what the parts are answered; the decision is that of one of them."""
        self._owner, self.decision, self.is_event_stream = owner, decision, owner.is_streamed
        self.sent_s = owner.router.now_s()
        self.num_answers = owner.parsed.fields.get("n") or 1
        self.parts: list[SplitPart] = []
        """In the order of their choices."""
        self._whole: Fields = {}

    @property
    def usage(self) -> ReportedUsage:
        """Return what tenants are charged for, so far."""
        charged = [msgspec.structs.asdict(part.charged) for part in self.parts]
        return ReportedUsage(**_added(charged, self.num_answers))

    @property
    def num_output_tokens(self) -> int:
        return self.usage.completion_tokens or 0

    # What the client does.

    def pause(self) -> None:
        for part in self.parts:
            part.request.pause()

    def resume(self) -> None:
        for part in self.parts:
            part.request.resume()

    def stop(self, *_: object) -> None:
        for part in self.parts:
            if part.is_running:
                part.is_running = False
                part.request.stop()

    def abort(self, error: RequestError) -> bool:
        """End a stream that has begun, with an event that says why unless one did, and return whether it had begun."""
        if self._has_begun:
            if not self._has_sent_error:
                self._owner.responder.send(error_event(error, is_named=False))
            self._owner.responder.break_off()
        return self._has_begun

    def close(self) -> None:
        """Let go of the parts, which refer to this, and of their requests, which refer to them."""
        for part in self.parts:
            del part.request
        self.parts.clear()

    # What the parts are answered.

    def on_data(self, part: SplitPart) -> None:
        """Send whole events on, as those of one answer; keep the rest until all is there."""
        if self.is_event_stream and part.status == HTTPStatus.OK:
            *events, part.kept = part.kept.replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                self._relay(part, event)
        if part.is_running and sum(len(each.kept) for each in self.parts) > MAX_KEPT_BYTES:
            self._fail(f"the answers have more than {MAX_KEPT_BYTES} bytes")

    def on_end(self, part: SplitPart, error: Exception | None) -> None:
        """End the client's answer with the last part, or with the first that failed."""
        self._owner.tried |= part.request.tried
        if part.status not in (None, HTTPStatus.OK) and not self._has_begun:
            self.stop()
            self._end(part, part.kept, error)
        elif error is not None or part.status != HTTPStatus.OK:
            self._fail(str(error or f"a worker answered {part.status}"))
        elif not any(each.is_running for each in self.parts):
            self._finish(part)

    def _relay(self, part: SplitPart, event: bytes) -> None:
        """Send an event of a stream on; its usage is sent at the end, with that of the others."""
        try:
            chunk = part.read(event.removeprefix(b"data:"))
        except msgspec.DecodeError:  # `[DONE]`, or a comment
            return
        self._whole = self._whole or chunk
        if chunk.get("choices") or part.usage is None:
            self._has_sent_error |= "error" in chunk
            same = {name: self._whole[name] for name in ("id", "created") if name in self._whole}
            self._send(part, encode_event(chunk | same))

    def _finish(self, last: SplitPart) -> None:
        if not self.is_event_stream:
            try:
                answers = [part.read(part.kept) for part in self.parts]
            except msgspec.DecodeError as error:
                self._fail(f"a worker's answer cannot be read ({error})")
                return
            self._whole = answers[0] | {"choices": [choice for each in answers for choice in each.get("choices") or ()]}
        usages = [part.usage for part in self.parts if part.usage is not None]
        if len(usages) == len(self.parts):
            self._whole["usage"] = _added(usages, self.num_answers)
        if not self.is_event_stream:
            self._end(last, msgspec.json.encode(self._whole))
        else:
            self._end(last, (encode_event(self._whole | {"choices": []}) if usages else b"") + DONE)

    def _fail(self, reason: str) -> None:
        self._owner.abort(RequestError(HTTPStatus.BAD_GATEWAY, reason, code="worker_failed"))

    def _end(self, part: SplitPart, piece: bytes, error: Exception | None = None) -> None:
        self._send(part, piece)
        self._owner.responder.end()
        self._owner.end(error)

    def _send(self, part: SplitPart, piece: bytes) -> None:
        """Send the client the next bytes; the answer begins with the head of the part that they are from."""
        if not self._has_begun:
            self._has_begun = True
            self.first_byte_s = round(self._owner.router.now_s() - self._owner.started_s, 6)
            ours = {b"x-request-id": self._owner.request_id}
            headers = [(name, ours.get(name, value)) for name, value in part.headers if name != b"content-length"]
            self._owner.responder.start(part.status or HTTPStatus.BAD_GATEWAY, headers)
        self._owner.responder.send(piece)


def _added(usages: list[Fields], num_answers: int) -> Fields:
    """Return the usage of all, in the order of their choices: tokens of a prompt count with its first answer."""
    prompts, added = _sums(usages[::num_answers]), _sums(usages)
    added |= {name: value for name, value in prompts.items() if name.startswith(("prompt", "cached"))}
    if "total_tokens" in added:
        added["total_tokens"] = added["prompt_tokens"] + added["completion_tokens"]
    return added


def _sums(usages: list[Fields]) -> Fields:
    sums = usages[0].copy()
    for name, value in sums.items():
        values = [each.get(name) for each in usages]
        if isinstance(value, dict):
            sums[name] = _sums([each or {} for each in values])
        elif value is not None:
            sums[name] = sum(each or 0 for each in values)
    return sums
