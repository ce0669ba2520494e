"""Turns the engine's outputs into response bodies in OpenAI's format, whole or as server-sent events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import msgspec

from kvist.engine.async_engine import Generation
from kvist.engine.request import LogprobEntry, RequestOutput, TokenLogprobs
from kvist.engine.server.intake import Job
from kvist.engine.server.tools import Body, Reader, Reading, make_reader
from kvist.openai.errors import RequestError, error_event
from kvist.openai.requests import RemoteDecode, RemotePrefill
from kvist.openai.responses import DONE, encode_event
from kvist.openai.tokenization import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Heading:
    """Fields that every body of one answer repeats, and the endpoints at which other workers fetch its blocks."""

    id: str
    created: int
    model: str
    kv_transfer_endpoints: tuple[str, ...] = ()


@dataclass(eq=False)
class Shape(ABC):
    """The format of one endpoint's answers."""

    is_ended_by_done = True

    _heading: Heading
    _tokenizer: ChatTokenizer
    _job: Job
    _readers: dict[int, Reader] = field(default_factory=dict, init=False)

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput], usage: Body) -> Body:
        """Return the body for all choices, each as one output."""

    @abstractmethod
    def events(self, index: int, output: RequestOutput, counter: UsageCounter) -> Iterator[Body]:
        """Yield the bodies of events that an output adds to a stream."""

    def last_events(self, counter: UsageCounter) -> Iterator[Body]:  # noqa: ARG002
        """Yield the bodies of events at the end of a stream."""
        yield from ()

    def encode(self, body: Body) -> bytes:
        """Return one event of a stream."""
        return encode_event(body)

    def _read(self, index: int, output: RequestOutput) -> Reading:
        """Return the text, calls and reasoning that an output adds to a choice."""
        if self._job.tools is None:
            return Reading(output.text)
        return self._readers.setdefault(index, make_reader(self._job.tools)).feed(output.text, output.is_last)

    def _reason(self, index: int, output: RequestOutput) -> str | None:
        """Return why a choice ended; `tool_calls` if the model chose to call tools."""
        has_called = index in self._readers and self._readers[index].has_called
        return "tool_calls" if has_called and output.finish_reason == "stop" else output.finish_reason


@dataclass(eq=False)
class ChoicesShape(Shape):
    """An answer with any number of choices, in OpenAI's formats of chats and text completions."""

    kind = kind_of_chunk = "text_completion"
    opening_delta: ClassVar[Body | None] = None
    """What a choice's first chunk adds to it, before the first token."""

    _opened: set[int] = field(default_factory=set, init=False)

    def whole(self, outputs: Sequence[RequestOutput], usage: Body) -> Body:
        """Return the body for all choices, and the parameters by which another worker fetches the blocks, if any."""
        body = self._body(self.kind, [self._choice(*each) for each in enumerate(outputs)], usage)
        return body | self._transfer_params(outputs[0])

    def events(self, index: int, output: RequestOutput, counter: UsageCounter) -> Iterator[Body]:
        if index not in self._opened:
            self._opened.add(index)
            if output.remote_request_id is not None:
                yield self._body(self.kind_of_chunk, []) | self._transfer_params(output)
            if self.opening_delta is not None:
                choice = {"index": index, "delta": self.opening_delta, "finish_reason": None, "logprobs": None}
                yield self._body(self.kind_of_chunk, [choice])
        if output.text or output.logprobs or output.is_last or any(self._token_ids(output).values()):
            usage = counter.usage() if self._job.stream_options.continuous_usage_stats else None
            yield self._body(self.kind_of_chunk, [self._addition(index, output)], usage)

    def last_events(self, counter: UsageCounter) -> Iterator[Body]:
        if self._job.stream_options.include_usage:
            yield self._body(self.kind_of_chunk, [], counter.usage())

    def _transfer_params(self, output: RequestOutput) -> Body:
        """Return the parameters with which another worker fetches the prompt's blocks, if it is held for one."""
        if output.remote_request_id is None:
            return {}
        is_cached = isinstance(self._job.handoff, RemoteDecode) and self._job.handoff.max_cached_tokens is not None
        num_tokens = output.num_cached_tokens if is_cached else len(self._job.prompts[0])
        remote = RemotePrefill(self._heading.kv_transfer_endpoints, output.remote_request_id, num_tokens)
        return {"kv_transfer_params": {"do_remote_prefill": True, **msgspec.structs.asdict(remote)}}

    @abstractmethod
    def _choice(self, index: int, output: RequestOutput) -> Body:
        """Return a choice in the format of a whole answer."""

    def _prompt_logprobs(self, output: RequestOutput) -> Body:
        """Return the prompt's log probabilities in vLLM's format, if the request asks for them."""
        if self._job.params.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": [None, *map(self._logprobs_by_id, output.prompt_logprobs)]}

    def _logprobs_by_id(self, logprobs: TokenLogprobs) -> Body:
        ranked = {entry.token_id: (entry.logprob, rank) for rank, entry in enumerate(logprobs.top, 1)}
        ranked.setdefault(logprobs.token.token_id, (logprobs.token.logprob, logprobs.rank))
        return {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": self._token_text(token_id)}
            for token_id, (logprob, rank) in ranked.items()
        }

    def _token_text(self, token_id: int) -> str:
        """Return a token's name in log probabilities."""
        if self._job.options.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.text([token_id])

    def _token_ids(self, output: RequestOutput) -> Body:
        return {"token_ids": output.token_ids} if self._job.options.return_token_ids else {}

    def _addition(self, index: int, output: RequestOutput) -> Body:
        """Return what an output adds to a choice, in the format of a chunk."""
        return self._choice(index, output)

    def _body(self, kind: str, choices: list[Body], usage: Body | None = None) -> Body:
        head = self._heading
        ids = {"id": head.id, "created": head.created, "model": head.model}
        return {**ids, "choices": choices, "usage": usage, "object": kind}


class ChatShape(ChoicesShape):
    """Answers of /v1/chat/completions."""

    kind, kind_of_chunk = "chat.completion", "chat.completion.chunk"
    opening_delta: ClassVar[Body | None] = {"role": "assistant", "content": ""}

    def _choice(self, index: int, output: RequestOutput) -> Body:
        text, calls, reasoning = self._read(index, output)
        message: Body = {"content": text or None if calls else text, "role": "assistant"}
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = [{key: value for key, value in call.items() if key != "index"} for call in calls]
        return {"index": index, "message": message, **self._ending(index, output), **self._token_ids(output)}

    def whole(self, outputs: Sequence[RequestOutput], usage: Body) -> Body:
        return super().whole(outputs, usage) | self._prompt_logprobs(outputs[0])

    def _addition(self, index: int, output: RequestOutput) -> Body:
        added = zip(("content", "tool_calls", "reasoning"), self._read(index, output), strict=True)
        delta = {name: value for name, value in added if value}
        return {"index": index, "delta": delta, **self._ending(index, output), **self._token_ids(output)}

    def _ending(self, index: int, output: RequestOutput) -> Body:
        content = [
            {**self._entry(sampled), "top_logprobs": [self._entry(entry) for entry in top]}
            for sampled, top, _ in output.logprobs
        ]
        reason = {"finish_reason": self._reason(index, output), "stop_reason": output.stop_reason}
        return {**reason, "logprobs": {"content": content} if content else None}

    def _entry(self, entry: LogprobEntry) -> Body:
        token_bytes = list(self._tokenizer.token_bytes(entry.token_id))
        return {"token": self._token_text(entry.token_id), "logprob": entry.logprob, "bytes": token_bytes}


@dataclass(eq=False)
class CompletionShape(ChoicesShape):
    """Answers of /v1/completions."""

    _offsets: dict[int, int] = field(default_factory=dict, init=False)
    _echoed: set[int] = field(default_factory=set, init=False)

    def _choice(self, index: int, output: RequestOutput) -> Body:
        text, logprobs, first = output.text, output.logprobs, None
        if self._job.params.echo and index not in self._echoed:
            self._echoed.add(index)
            prompt = self._job.prompts[index // self._job.params.n]
            first, logprobs = prompt[0], output.prompt_logprobs + logprobs
            text = self._tokenizer.text(prompt, skip_special_tokens=self._job.options.skip_special_tokens) + text
        has_logprobs = self._job.params.num_logprobs is not None and (logprobs or first is not None)
        return {
            "index": index,
            "text": text,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "logprobs": self._logprobs(index, first, logprobs) if has_logprobs else None,
            **self._token_ids(output),
            **self._prompt_logprobs(output),
        }

    def _logprobs(self, index: int, first: int | None, logprobs: tuple[TokenLogprobs, ...]) -> Body:
        """Return log probabilities in four parallel lists, null for the `first` token of an echoed prompt."""
        text_of = self._token_text
        tokens = [text_of(each.token.token_id) for each in logprobs]
        tops: list[Body | None] = [
            {text_of(entry.token_id): entry.logprob for entry in (*each.top, each.token)} for each in logprobs
        ]
        sampled: list[float | None] = [each.token.logprob for each in logprobs]
        if first is not None:
            tokens, tops, sampled = [text_of(first), *tokens], [None, *tops], [None, *sampled]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(token)
        return {"tokens": tokens, "token_logprobs": sampled, "top_logprobs": tops, "text_offset": offsets}


class UsageCounter:
    """Counts a job's tokens: each prompt once, however many choices it has, and the output of every choice."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._num_output_tokens = 0
        self._num_cached_tokens = [0] * len(job.prompts)

    def add(self, index: int, output: RequestOutput) -> None:
        """Count an output of the choice at `index`; a prompt's cached tokens are those of its first choice."""
        self._num_output_tokens += len(output.token_ids)
        prompt, choice = divmod(index, self._job.params.n)
        if choice == 0:
            self._num_cached_tokens[prompt] = max(self._num_cached_tokens[prompt], output.num_cached_tokens)

    def usage(self) -> Body:
        num_prompt, num_output = sum(map(len, self._job.prompts)), self._num_output_tokens
        counts = {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}
        return {**counts, "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens)}}


async def _outputs(generation: Generation, job: Job) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yield the outputs of a job; without the generated token if only the prompt was asked for."""
    async for index, output in generation.outputs():
        yield index, replace(output, token_ids=(), text="", logprobs=()) if job.is_output_dropped else output


async def collect(generation: Generation, job: Job, shape: Shape) -> Body:
    """Return the whole answer once every choice is finished; raises RequestError if the engine fails."""
    counter = UsageCounter(job)
    answers: dict[int, RequestOutput] = {}
    async for index, output in _outputs(generation, job):
        if output.error is not None:
            raise RequestError(500, output.error)
        counter.add(index, output)
        answers[index] = answers[index] + output if index in answers else output
    return shape.whole([answers[index] for index in sorted(answers)], counter.usage())


async def stream_events(generation: Generation, job: Job, shape: Shape) -> AsyncIterator[bytes]:
    """Yield the answer as server-sent events, `[DONE]` last; if the engine fails, the last event is the error.

    Raises RequestError if the engine fails before the first event. Routers take the first byte for the first token:
    only the parameters with which another worker fetches the prompt may come before that.
    """
    counter = UsageCounter(job)
    has_begun = False
    async for index, output in _outputs(generation, job):
        if output.error is not None and not has_begun:
            raise RequestError(500, output.error)
        if output.error is not None:
            yield error_event(RequestError(500, output.error), is_named=not shape.is_ended_by_done)
            break
        counter.add(index, output)
        for body in shape.events(index, output, counter):
            has_begun = True
            yield shape.encode(body)
    else:
        for body in shape.last_events(counter):
            yield shape.encode(body)
    if shape.is_ended_by_done:
        yield DONE
