"""Anthropic's messages and OpenAI's responses, by their own clients: what a chat says, in their words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from kvist.engine.server.other_apis import _free_text

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
QUESTION: list[Any] = [{"role": "user", "content": "What does the function return?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}
BEST: dict[str, Any] = {"model": "tiny", "extra_body": {"temperature": 0}}
"""The same by Anthropic's client, which has no word for it any more."""
WEATHER = {"name": "weather", "description": "of a city"}


@pytest.fixture
def claude(served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def gpt(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def chat(post) -> dict[str, Any]:
    """What the same is as a chat."""
    body: dict[str, Any] = post(CHAT, {"messages": QUESTION, "max_tokens": 10, "temperature": 0}).json()
    return body


def test_a_message_says_what_a_chat_says_whole_and_streamed(claude, chat) -> None:
    told, usage = chat["choices"][0], chat["usage"]
    asked: dict[str, Any] = {**BEST, "messages": QUESTION, "max_tokens": 10}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [kind for kind in kinds if "delta" not in kind and kind != "text"] == [
        *("message_start", "content_block_start", "content_block_stop", "message_stop")
    ]
    for message in (whole, streamed):
        assert [(block.type, block.text) for block in message.content] == [("text", told["message"]["content"])]
        assert message.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[told["finish_reason"]]
        assert message.usage.input_tokens + message.usage.cache_read_input_tokens == usage["prompt_tokens"]
        assert message.usage.output_tokens == usage["completion_tokens"]


def test_a_message_ends_at_its_stop_sequence_and_says_at_which(claude, chat) -> None:
    text = chat["choices"][0]["message"]["content"]
    stop = text[4:7]
    message = claude.messages.create(**BEST, messages=QUESTION, max_tokens=10, stop_sequences=["@@", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]


def test_an_answer_without_any_text_has_an_empty_one_whole_and_streamed(claude, gpt) -> None:
    at_once = {"temperature": 0, "stop_token_ids": [*range(3072)]}
    asked: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": 10, "extra_body": at_once}
    with claude.messages.stream(**asked) as stream:
        messages = [claude.messages.create(**asked), stream.get_final_message()]
    assert [[block.text for block in message.content] for message in messages] == [[""], [""]]
    asked = {"model": "tiny", "input": QUESTION, "extra_body": at_once}
    *_, ended = gpt.responses.create(**asked, stream=True)
    responses = [gpt.responses.create(**asked), ended.response]
    assert [[part.text for item in each.output for part in item.content] for each in responses] == [[""], [""]]


def test_a_message_calls_the_tool_it_has_to(claude) -> None:
    asked: dict[str, Any] = {**BEST, "messages": QUESTION, "max_tokens": 60}
    asked["tools"] = [WEATHER | {"input_schema": CITY}]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
        with claude.messages.stream(**asked, tool_choice=choice) as stream:
            streamed = stream.get_final_message()
        for message in (claude.messages.create(**asked, tool_choice=choice), streamed):
            (use,) = message.content
            assert (use.type, use.name, use.input) == ("tool_use", "weather", {"city": "Oslo"})
            assert use.id
    cut = claude.messages.create(**asked | {"max_tokens": 1}, tool_choice=choice)
    assert (cut.stop_reason, cut.content[0].input) == ("max_tokens", {})


def test_a_response_says_what_a_chat_says_whole_and_streamed(gpt, chat) -> None:
    told, usage = chat["choices"][0], chat["usage"]
    asked = {**GREEDY, "input": QUESTION, "max_output_tokens": 10}
    whole = gpt.responses.create(**asked)
    with gpt.responses.stream(**asked) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    for response in (whole, events[-1].response):
        assert response.output_text == told["message"]["content"]
        assert response.status == ("incomplete" if told["finish_reason"] == "length" else "completed")
        assert (response.usage.input_tokens, response.usage.output_tokens) == (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == told["message"]["content"]


def test_a_response_calls_a_tool_and_follows_a_schema(gpt) -> None:
    asked: dict[str, Any] = {**GREEDY, "input": "Where?", "max_output_tokens": 60}
    asked["parallel_tool_calls"] = False
    tools = [{"type": "function", **WEATHER, "parameters": CITY, "strict": True}]
    for choice in ("required", {"type": "function", "name": "weather"}):
        whole = gpt.responses.create(**asked, tools=tools, tool_choice=choice)
        stream = gpt.responses.create(**asked, tools=tools, tool_choice=choice, stream=True)
        for response in (whole, list(stream)[-1].response):
            (call,) = response.output
            assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Oslo"})
    schema = {"format": {"type": "json_schema", "name": "place", "schema": CITY}}
    assert gpt.responses.create(**asked, text=schema).output_text.startswith("{")


def test_calls_of_tools_in_a_namespace_or_of_free_text_are_told_as_the_client_named_them(gpt) -> None:
    asked: dict[str, Any] = {**GREEDY, "input": "Where?", "max_output_tokens": 60, "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False, "include": ["reasoning.encrypted_content"]}
    inner = {"type": "function", **WEATHER, "parameters": CITY, "strict": True}
    for tool, said in (
        (
            {"type": "namespace", "name": "places", "description": "", "tools": [inner]},
            {"type": "function_call", "namespace": "places", "name": "weather"},
        ),
        ({"type": "custom", **WEATHER}, {"type": "custom_tool_call", "name": "weather"}),
    ):
        (whole,) = gpt.responses.create(**asked, tools=[tool]).to_dict()["output"]
        *events, last = gpt.responses.create(**asked, tools=[tool], stream=True)
        (streamed,) = last.response.to_dict()["output"]
        assert said.items() <= whole.items()
        assert whole | dict.fromkeys(("id", "call_id")) == streamed | dict.fromkeys(("id", "call_id"))
        told = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
        assert told == ([whole["input"]] if tool["type"] == "custom" else [])


@pytest.mark.parametrize(
    ("arguments", "text"), [('{"input": "a"}', "a"), ('{"input": "a', '{"input": "a'), ("[]", "[]")]
)
def test_free_text_is_what_the_model_wrote_if_that_is_no_object_with_it(arguments: str, text: str) -> None:
    assert _free_text(arguments) == text


def test_tokens_of_a_message_are_counted_without_an_answer(claude, chat) -> None:
    assert claude.messages.count_tokens(model="tiny", messages=QUESTION).input_tokens == chat["usage"]["prompt_tokens"]


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: A"}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (MESSAGES, {"messages": QUESTION}, "max_tokens"),
        (MESSAGES, {"messages": QUESTION, "max_tokens": 0}, "max_tokens"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document"}]}], "max_tokens": 1}, "document"),
        (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"input": "x", "background": True}, "background"),
        (RESPONSES, {"input": "x", "truncation": "auto"}, "truncation"),
        (RESPONSES, {"input": "x", "include": ["message.output_text.logprobs"]}, "include"),
        (RESPONSES, {"input": "x", "tools": [{"type": "custom", "name": "f", "format": GRAMMAR}]}, "tools"),
        (f"{MESSAGES}/count_tokens", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        (RESPONSES, {}, "input"),
        (RESPONSES, {"input": "x", "kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(path: str, body: dict[str, Any], named: str, post) -> None:
    refusal = post(path, body)
    assert refusal.status_code == 400
    assert named in refusal.json()["error"]["message"]
