"""Answers as events, of outputs that are given one by one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvist.engine.request import RequestOutput
from kvist.engine.server.answers import ChatShape, Heading, stream_events
from kvist.engine.server.intake import AnswerOptions, Job
from kvist.openai import requests as api
from kvist.openai.errors import RequestError


class Outputs:
    """A generation's outputs, and how many were taken."""

    def __init__(self, *outputs: tuple[int, RequestOutput]) -> None:
        self._outputs = outputs
        self.num_taken = 0

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        for output in self._outputs:
            self.num_taken += 1
            yield output


async def streamed(outputs: Any, options: AnswerOptions | None = None) -> AsyncIterator[tuple[int, str]]:
    """Yield events, and how many outputs had been taken before each."""
    job = Job(([1, 2],), api.SamplingParams(n=2), options or AnswerOptions(), None, None, True, api.StreamOptions())
    shape = ChatShape(Heading("id", 0, "m"), None, job)  # type: ignore[arg-type]
    async for event in stream_events(outputs, job, shape):
        yield outputs.num_taken, event.decode().removeprefix("data: ").strip()


async def test_nothing_is_sent_before_the_first_token_and_each_choice_opens_with_its_role() -> None:
    outputs = Outputs(
        (1, RequestOutput("b", (7,), "x")),
        (0, RequestOutput("a", (5,))),  # a token of which no text is complete yet
        (0, RequestOutput("a", (6,), "y", finish_reason="stop")),
        (1, RequestOutput("b", (8,), "z", finish_reason="stop")),
    )
    *events, (_, done) = [each async for each in streamed(outputs)]
    assert done == "[DONE]"
    told = [(num, each["index"], each["delta"]) for num, text in events for each in json.loads(text)["choices"]]
    opening = {"role": "assistant", "content": ""}
    assert told[:3] == [(1, 1, opening), (1, 1, {"content": "x"}), (2, 0, opening)]
    assert [(idx, delta["content"]) for _, idx, delta in told[3:]] == [(0, "y"), (1, "z")]


async def test_every_token_id_that_is_asked_for_is_sent_also_of_characters_that_are_not_whole() -> None:
    outputs = Outputs(
        (0, RequestOutput("a", (5,))),
        (0, RequestOutput("a", (6,), "é")),
        (0, RequestOutput("a", (7,), finish_reason="length")),
    )
    *events, _ = [event async for _, event in streamed(outputs, AnswerOptions(return_token_ids=True))]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert [token_id for choice in choices for token_id in choice.get("token_ids", [])] == [5, 6, 7]


async def test_an_engine_that_fails_at_once_has_opened_nothing_and_a_stream_goes_on_to_say_so() -> None:
    failed = (0, RequestOutput("a", error="broken"))
    with pytest.raises(RequestError, match="broken"):
        await anext(streamed(Outputs(failed)))
    *_, (_, error), (_, done) = [each async for each in streamed(Outputs((0, RequestOutput("a", (5,), "x")), failed))]
    assert (json.loads(error)["error"]["message"], done) == ("broken", "[DONE]")
