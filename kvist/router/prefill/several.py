"""Several answers to one request, each by a request of its own, put together as if one worker had given them all.

What a prefill worker holds of a prompt is for one sequence, whatever its engine. So a request for n answers to each of
m prompts becomes m x n requests, each of which goes its own way, to a pair or to one worker; a prefill worker finds in
its cache what it has computed for another of them. Choices are numbered as engines do, those of a prompt side by side;
a seed is another for each answer to a prompt, as in vLLM; and usage counts a prompt once.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from kvist.events import WorkerRank
from kvist.http import Headers, Responder
from kvist.openai.errors import RequestError, error_body
from kvist.openai.requests import Fields, with_fields, without_field
from kvist.openai.responses import DONE, encode_event
from kvist.router.policy.decision import Decision
from kvist.router.prefill.dialect import MAX_KEPT_BYTES
from kvist.router.prompts import CHAT_PATH, COMPLETION_PATH, Ask
from kvist.router.usage import ReportedUsage

if TYPE_CHECKING:
    from kvist.router.forward import Forwarding

MAX_ANSWERS = 128
"""How many requests one may become: vLLM's bound of `n`."""

_decode = msgspec.json.Decoder(Fields).decode


def one_answer(path: str, ask: Ask) -> Ask | None:
    """Return what is asked by that of the requests which has the longest prompt; None where there can be only one.

    Of beams and the best of several one worker chooses, usage in each chunk is that of all answers, and what a seed
    that is no integer stands for is a worker's to say.
    """
    said, num_answers = ask.fields.get, ask.fields.get("n") or 1
    if path not in (CHAT_PATH, COMPLETION_PATH) or said("best_of") not in (None, 1) or said("use_beam_search"):
        return None
    if type(num_answers) is not int or not 1 < num_answers * ask.num_prompts <= MAX_ANSWERS:
        return None
    if (said("stream_options") or {}).get("continuous_usage_stats") or type(said("seed") or 0) is not int:
        return None
    num_tokens = ask.num_tokens // ask.num_prompts if ask.token_ids is None else len(ask.token_ids)
    return msgspec.structs.replace(ask, fields={**ask.fields, "n": 1}, num_prompts=1, num_tokens=num_tokens)


def bodies_of(ask: Ask, body: bytes) -> list[bytes]:
    """Return the requests' bodies, in the order of their choices."""
    seed, prompts = ask.fields.get("seed"), [Fields()]
    if ask.num_prompts > 1:
        body = without_field(body, ask.fields, "prompt")
        prompts = [{"prompt": prompt} for prompt in ask.fields["prompt"]]
    seeds = [{"seed": _seed_of(seed, idx)} if seed is not None else {} for idx in range(ask.fields.get("n") or 1)]
    return [with_fields(body, {"n": 1} | prompt | each) for prompt in prompts for each in seeds]


def _seed_of(first: int, idx: int) -> int:
    """Return the seed of an answer to a prompt, from 0 on where it would pass a bound of workers, 63 bits or 64."""
    past = next((bound for bound in (2**63, 2**64) if first < bound <= first + idx), 0)
    return first + idx - past


class _Answer(msgspec.Struct):
    choices: list[Fields] | None = None
    usage: Fields | None = None


class Part(Responder):
    """What one of the requests is answered."""

    request: Forwarding

    def __init__(self, answers: Answers, choice_idx: int) -> None:
        self._answers, self._choice_idx = answers, choice_idx
        self.status: int | None = None
        self.headers: Headers = []
        self.kept = b""
        self.usage: Fields | None = None
        self.charged = ReportedUsage(0, 0, 0)
        self.is_running = True

    @property
    def prefill_rank(self) -> WorkerRank | None:
        """Return who computes the prompt for its first answer; None for that one, and where it is not known yet."""
        first = self._answers.parts[self._choice_idx // self._answers.num_answers * self._answers.num_answers]
        computed_by = first.request.computed_by
        return None if computed_by is None else computed_by.chosen.target

    def start(self, status: int, headers: Headers) -> None:
        """Take note of how it begins."""
        self.status, self.headers = status, headers

    def send(self, piece: bytes) -> None:
        """Keep the next bytes, but for what can be sent on."""
        self.kept += piece
        self._answers.on_data(self)

    def end(self) -> None:
        """Leave it to the request to say so, and whether it has failed."""

    cut = end

    def on_end(self, error: Exception | None) -> None:
        """Take note that the request has ended."""
        self.charged = self.request.charged() or self.charged
        if self.is_running:
            self.is_running = False
            self._answers.on_end(self, error)

    def read(self, data: bytes) -> Fields:
        """Return an answer, or a chunk of one, with its choice's number; keep its usage. Raises DecodeError."""
        fields = _decode(data)
        read = msgspec.convert(fields, _Answer)
        self.usage = read.usage or self.usage
        if read.choices is not None:
            fields["choices"] = [choice | {"index": self._choice_idx} for choice in read.choices]
        return fields


class Answers:
    """What a request has for an attempt to answer that is answered by several others; all fail with the first."""

    first_byte_s: float | None = None
    _has_begun = False
    _has_told_error = False

    def __init__(self, owner: Forwarding, decision: Decision) -> None:
        """Send the owner's client what the others are answered; the decision is one of theirs."""
        self._owner, self.decision, self.is_event_stream = owner, decision, owner.is_streamed
        self.sent_s = owner.router.now_s()
        self.num_answers = owner.ask.fields.get("n") or 1
        self.parts: list[Part] = []
        """In the order of their choices."""
        self._whole: Fields = {}

    @property
    def usage(self) -> ReportedUsage:
        """Return what tenants are charged for, so far."""
        charged = [msgspec.structs.asdict(part.charged) for part in self.parts]
        return ReportedUsage(**_added(charged, self.num_answers))

    @property
    def num_output_tokens(self) -> int:
        """Return how many tokens all answers have."""
        return self.usage.completion_tokens or 0

    # What the client does.

    def pause(self) -> None:
        """Let the workers wait for the client."""
        for part in self.parts:
            part.request.pause()

    def resume(self) -> None:
        """Go on."""
        for part in self.parts:
            part.request.resume()

    def stop(self, *_: object) -> None:
        """Let the workers know that nobody waits for them any more."""
        for part in self.parts:
            if part.is_running:
                part.is_running = False
                part.request.stop()

    def break_off(self, error: RequestError) -> bool:
        """End a stream that has begun with an event that says why, unless one did. Return if it had begun."""
        if self._has_begun:
            if not self._has_told_error:
                self._owner.responder.send(b"data: " + error_body(error) + b"\n\n")
            self._owner.responder.end()
        return self._has_begun

    # What the requests are answered.

    def on_data(self, part: Part) -> None:
        """Send whole events on, as those of one answer; keep the rest until all is there."""
        if self.is_event_stream and part.status == HTTPStatus.OK:
            *events, part.kept = part.kept.replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                self._relay(part, event)
        if part.is_running and sum(len(each.kept) for each in self.parts) > MAX_KEPT_BYTES:
            self._fail(f"the answers have more than {MAX_KEPT_BYTES} bytes")

    def on_end(self, part: Part, error: Exception | None) -> None:
        """End the client's answer with the last of them, or with the first that failed."""
        self._owner.tried |= part.request.tried
        if part.status not in (None, HTTPStatus.OK) and not self._has_begun:
            self.stop()
            self._end(part, part.kept, error)
        elif error is not None or part.status != HTTPStatus.OK:
            self._fail(str(error or f"a worker answered {part.status}"))
        elif not any(each.is_running for each in self.parts):
            self._finish(part)

    def _relay(self, part: Part, event: bytes) -> None:
        """Send an event of a stream on; its usage is for the end."""
        try:
            chunk = part.read(event.removeprefix(b"data:"))
        except msgspec.DecodeError:  # `[DONE]`, or a comment
            return
        self._whole = self._whole or chunk
        if chunk.get("choices") or part.usage is None:
            self._has_told_error |= "error" in chunk
            same = {name: self._whole[name] for name in ("id", "created") if name in self._whole}
            self._send(part, encode_event(chunk | same))

    def _finish(self, last: Part) -> None:
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
        self._owner.break_off(RequestError(HTTPStatus.BAD_GATEWAY, reason, code="worker_failed"))

    def _end(self, part: Part, piece: bytes, error: Exception | None = None) -> None:
        self._send(part, piece)
        self._owner.responder.end()
        self._owner.end(error)

    def _send(self, part: Part, piece: bytes) -> None:
        """Send the client the next bytes, the first of them under the head of the part that they are from."""
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
    return added | (
        {"total_tokens": added["prompt_tokens"] + added["completion_tokens"]} if "total_tokens" in added else {}
    )


def _sums(usages: list[Fields]) -> Fields:
    sums = usages[0].copy()
    for name, value in sums.items():
        others = [each.get(name) for each in usages]
        if isinstance(value, dict):
            sums[name] = _sums([each or {} for each in others])
        elif value is not None:
            sums[name] = sum(each or 0 for each in others)
    return sums
