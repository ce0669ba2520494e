"""From the engine's outputs to response bodies, whole or as server-sent events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvist.engine.async_engine import Generation
from kvist.engine.request import RequestOutput, TokenLogprobs
from kvist.engine.server.intake import Job
from kvist.openai import responses as api
from kvist.openai.errors import RequestError, error_body
from kvist.openai.requests import KvTransferParams
from kvist.openai.tokenization import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Heading:
    """What every body of one answer repeats, and where the blocks of a prompt that goes on elsewhere can be fetched."""

    id: str
    created: int
    model: str
    kv_transfer_endpoints: tuple[str, ...] = ()


class Shape(ABC):
    """How one endpoint spells an answer."""

    def __init__(self, heading: Heading, tokenizer: ChatTokenizer) -> None:
        self._heading = heading
        self._head: dict[str, Any] = {"id": heading.id, "created": heading.created, "model": heading.model}
        self._tokenizer = tokenizer

    def opening(self, index: int) -> api.ChatCompletionChunk | api.Completion | None:  # noqa: ARG002
        """Return the chunk that comes before a choice's first token, if there is one."""
        return None

    @abstractmethod
    def chunk(self, index: int, output: RequestOutput) -> api.ChatCompletionChunk | api.Completion:
        """Return the chunk that adds an output to a choice."""

    @abstractmethod
    def usage_chunk(self, usage: api.Usage) -> api.ChatCompletionChunk | api.Completion:
        """Return the last chunk of a stream that wants its usage."""

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput], usage: api.Usage) -> api.ChatCompletion | api.Completion:
        """Return the body for all choices, each as one output."""

    def _ending(self, outputs: Sequence[RequestOutput], usage: api.Usage) -> dict[str, Any]:
        """Return what ends a body: usage, and what another worker needs to go on, if its blocks are kept for one."""
        if outputs[0].remote_request_id is None:
            return {"usage": usage}
        params = KvTransferParams(
            do_remote_prefill=True,
            remote_endpoints=list(self._heading.kv_transfer_endpoints),
            remote_request_id=outputs[0].remote_request_id,
            num_tokens=usage.prompt_tokens,
            first_token_ids=list(outputs[0].token_ids),
        )
        return {"usage": usage, "kv_transfer_params": params}


class ChatShape(Shape):
    """Answers of /v1/chat/completions."""

    def opening(self, index: int) -> api.ChatCompletionChunk:
        choice = api.ChatChunkChoice(index, api.ChatDelta(role="assistant", content=""))
        return api.ChatCompletionChunk(**self._head, choices=[choice])

    def chunk(self, index: int, output: RequestOutput) -> api.ChatCompletionChunk:
        delta, logprobs = api.ChatDelta(content=output.text or None), self._logprobs(output.logprobs)
        return api.ChatCompletionChunk(
            **self._head, choices=[api.ChatChunkChoice(index, delta, output.finish_reason, logprobs)]
        )

    def usage_chunk(self, usage: api.Usage) -> api.ChatCompletionChunk:
        return api.ChatCompletionChunk(**self._head, choices=[], usage=usage)

    def whole(self, outputs: Sequence[RequestOutput], usage: api.Usage) -> api.ChatCompletion:
        choices = [
            api.ChatChoice(
                index, api.ChatMessage(output.text), output.finish_reason or "abort", self._logprobs(output.logprobs)
            )
            for index, output in enumerate(outputs)
        ]
        return api.ChatCompletion(**self._head, choices=choices, **self._ending(outputs, usage))

    def _logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> api.ChatLogprobs | None:
        if not logprobs:
            return None
        content = []
        for sampled, top in logprobs:
            one, most_likely = self._entry(*sampled), [self._entry(*entry) for entry in top]
            content.append(api.ChatTokenLogprob(one.token, one.logprob, one.bytes, most_likely))
        return api.ChatLogprobs(content)

    def _entry(self, token_id: int, logprob: float) -> api.TokenLogprob:
        text = self._tokenizer.token_text(token_id)
        return api.TokenLogprob(text, logprob, list(text.encode()))


class CompletionShape(Shape):
    """Answers of /v1/completions."""

    def __init__(self, heading: Heading, tokenizer: ChatTokenizer) -> None:
        super().__init__(heading, tokenizer)
        self._offsets: dict[int, int] = {}

    def chunk(self, index: int, output: RequestOutput) -> api.Completion:
        return api.Completion(**self._head, choices=[self._choice(index, output)])

    def usage_chunk(self, usage: api.Usage) -> api.Completion:
        return api.Completion(**self._head, choices=[], usage=usage)

    def whole(self, outputs: Sequence[RequestOutput], usage: api.Usage) -> api.Completion:
        choices = [self._choice(*each) for each in enumerate(outputs)]
        return api.Completion(**self._head, choices=choices, **self._ending(outputs, usage))

    def _choice(self, index: int, output: RequestOutput) -> api.CompletionChoice:
        return api.CompletionChoice(index, output.text, output.finish_reason, self._logprobs(index, output.logprobs))

    def _logprobs(self, index: int, logprobs: tuple[TokenLogprobs, ...]) -> api.CompletionLogprobs | None:
        if not logprobs:
            return None
        tokens = [self._tokenizer.token_text(each.sampled.token_id) for each in logprobs]
        tops = [
            {self._tokenizer.token_text(entry.token_id): entry.logprob for entry in (*each.top, each.sampled)}
            for each in logprobs
        ]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(token)
        return api.CompletionLogprobs(tokens, [each.sampled.logprob for each in logprobs], tops, offsets)


class UsageCounter:
    """Counts a job's tokens: each prompt once, whatever its choices, and every choice's output."""

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

    def usage(self) -> api.Usage:
        return api.Usage.of(sum(map(len, self._job.prompts)), self._num_output_tokens, sum(self._num_cached_tokens))


async def collect(generation: Generation, job: Job, shape: Shape) -> api.ChatCompletion | api.Completion | RequestError:
    """Return the whole answer once every choice is finished, or the refusal if the engine failed."""
    counter = UsageCounter(job)
    answers: dict[int, RequestOutput] = {}
    async for index, output in generation.outputs():
        if output.error is not None:
            return RequestError(500, output.error)
        counter.add(index, output)
        answers[index] = answers[index] + output if index in answers else output
    return shape.whole([answers[index] for index in sorted(answers)], counter.usage())


async def stream_events(generation: Generation, job: Job, shape: Shape) -> AsyncIterator[bytes]:
    """Yield the answer as server-sent events, `[DONE]` last; if the engine fails, an error stands for the rest.

    Nothing comes before the first token: routers take the first byte for it.
    """
    counter, opened = UsageCounter(job), set()
    async for index, output in generation.outputs():
        if output.error is not None:
            yield b"data: " + error_body(RequestError(500, output.error)) + b"\n\n"
            break
        if index not in opened and (opening := shape.opening(index)) is not None:
            yield api.encode_event(opening)
        opened.add(index)
        counter.add(index, output)
        if output.text or output.logprobs or output.is_last:
            yield api.encode_event(shape.chunk(index, output))
    else:
        if job.has_stream_usage:
            yield api.encode_event(shape.usage_chunk(counter.usage()))
    yield api.DONE
