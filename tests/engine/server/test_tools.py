"""Calls of tools: as models of each family spell them, whole and cut anywhere, and as a request requires them."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import openai
import pytest

from kvist.engine.request import RequestOutput
from kvist.engine.server.answers import ChatShape, Heading
from kvist.engine.server.intake import AnswerOptions, Job
from kvist.engine.server.tools import Reader, ToolChoice, make_reader, read_tools
from kvist.openai.chat_template import ChatTemplate
from kvist.openai.errors import RequestError
from kvist.openai.requests import ChatCompletionRequest, SamplingParams, StreamOptions

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is the weather?"}]
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Ålesund", "Oslo"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
HERMES, MISTRAL, LLAMA = "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
GEMMA, FUNCTION_GEMMA, HARMONY = "<|tool_call>", "<start_function_call>", "<|channel|>"
OSLO, NOW = ("weather", {"city": "Oslo"}), ("now", {})
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
SAID: list[tuple[str, str, str, list[Any]]] = [
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [OSLO]),
    (
        HERMES,
        f'Let me see.<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>',
        "Let me see.",
        [OSLO, NOW],
    ),
    (HERMES, "a < b <tool> is text", "a < b <tool> is text", []),
    (HERMES, "<tool_call>\nno JSON</tool_call>", "<tool_call>\nno JSON</tool_call>", []),
    (HERMES, '<tool_call>{"name": "weather", "arg', '<tool_call>{"name": "weather", "arg', []),
    (HERMES, "ends in <tool_", "ends in <tool_", []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": NaN}}', "", [("f", {"x": "NaN"})]),
    (HERMES, f"<tool_call>{'[' * 5000}", f"<tool_call>{'[' * 5000}", []),
    (HARMONY, f"<|channel|>commentary to=functions.f<|message|>{'[' * 5000}", "[" * 5000, []),
    (HARMONY, '<|channel|>commentary to=functions.f<|message|>{"x": NaN}', '{"x": NaN}', []),
    (MISTRAL, f"[TOOL_CALLS][{CALL}]", "", [OSLO]),
    (MISTRAL, '[TOOL_CALLS] weather{"city": "Oslo"}[TOOL_CALLS]now{}', "", [OSLO, NOW]),
    (MISTRAL, 'Well.[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', "Well.", [OSLO]),
    (LLAMA, '{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "now", "parameters": {}}', "", [OSLO, NOW]),
    (LLAMA, 'In JSON: {"name": "weather"}', 'In JSON: {"name": "weather"}', []),
    (
        GEMMA,
        'Well.<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>',
        "Well.",
        [OSLO, NOW],
    ),
    (
        GEMMA,
        '<|tool_call>call:f-1{a:[1,-2.5e3,true,null,<|"|>{a:"}, b<|"|>],b:{c:bare word,<|"|>d e<|"|>:{}}}<tool_call|>',
        "",
        [("f-1", {"a": [1, -2500.0, True, None, '{a:"}, b'], "b": {"c": "bare word", "d e": {}}})],
    ),
    (GEMMA, '<|tool_call>call:weather{city:<|"|>Os', '<|tool_call>call:weather{city:<|"|>Os', []),
    (GEMMA, "<|tool_call>call:weather{a:}<tool_call|>", "<|tool_call>call:weather{a:}<tool_call|>", []),
    (
        FUNCTION_GEMMA,
        "<start_function_call>call:weather{city:<escape>Oslo<escape>}<end_function_call>",
        "",
        [OSLO],
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Oslo"}<|call|><|start|>assistant to=functions.now<|channel|>commentary<|message|>{}',
        "Let me see.",
        [OSLO, NOW],
    ),
    (HARMONY, " to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "", [NOW]),
    (HARMONY, '<|channel|>commentary to=functions.now<|message|>{"a', '{"a', []),
    (HARMONY, "<|channel|>final<|message|>a < b, a <| b <|return|>", "a < b, a <| b ", []),
    (HARMONY, "<|channel|>final", "", []),
    (HARMONY, ' to{"structured": 1}', ' to{"structured": 1}', []),
    (HARMONY, " t", " t", []),
]


def rules(mark: str, tools: list[dict[str, Any]] | None = TOOLS, **choice: Any):
    template = ChatTemplate(mark, {})
    request = ChatCompletionRequest(messages=QUESTION, tools=tools)
    return read_tools(ToolChoice(**choice), request, template)[0]


def read(reader: Reader, pieces: list[str]) -> tuple[str, list[Any]]:
    text, calls = "", []
    for i, piece in enumerate(pieces):
        said, added, _ = reader.feed(piece, i == len(pieces) - 1)
        text += said
        calls += added
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert len({call["id"] for call in calls}) == len(calls)
    return text, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize(("mark", "output", "text", "calls"), SAID)
def test_calls_are_found_however_the_output_is_cut(mark: str, output: str, text: str, calls: list[Any]) -> None:
    assert read(make_reader(rules(mark)), [output]) == (text, calls)
    rng = random.Random(output)
    for _ in range(50):
        cuts = sorted(rng.choices(range(len(output) + 1), k=rng.randint(1, 12)))
        pieces = [output[a:b] for a, b in zip([0, *cuts], [*cuts, len(output)], strict=True)]
        assert read(make_reader(rules(mark)), pieces) == (text, calls)


@pytest.mark.parametrize("tools", [TOOLS, None])
async def test_what_gpt_oss_thinks_is_told_apart_whole_and_in_a_stream(tools: list[dict[str, Any]] | None) -> None:
    found = rules(HARMONY, tools)
    text = "<|channel|>analysis<|message|>Hm. Well.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    job = Job(([1],), SamplingParams(), AnswerOptions(), None, None, True, StreamOptions(), tools=found)

    def shape() -> ChatShape:
        return ChatShape(Heading("id", 0, "m"), None, job)  # type: ignore[arg-type]

    whole = shape()._choice(0, RequestOutput("a", (5,), text, finish_reason="stop"))
    assert whole["message"] == {"role": "assistant", "content": "Yes.", "reasoning": "Hm. Well."}
    stream, deltas = shape(), []
    for i in range(0, len(text), 5):
        reason = "stop" if i + 5 >= len(text) else None
        deltas.append(stream._addition(0, RequestOutput("a", (5,), text[i : i + 5], finish_reason=reason))["delta"])
    for name, expected in (("content", "Yes."), ("reasoning", "Hm. Well.")):
        assert "".join(delta.get(name, "") for delta in deltas) == expected


def test_without_tools_a_call_of_gpt_oss_is_text() -> None:
    output = "<|channel|>commentary to=functions.now<|message|>{}<|call|>"
    assert read(make_reader(rules(HARMONY, None)), [output]) == ("{}", [])


def test_one_call_alone_where_they_may_not_be_parallel() -> None:
    reader = make_reader(rules(HERMES, parallel_tool_calls=False))
    assert read(reader, [f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"]) == ("", [OSLO])


@pytest.mark.parametrize("choice", [{"tool_choice": "none"}, {}])
def test_an_output_is_text_where_no_call_is_wanted_or_none_is_known(choice: dict[str, Any]) -> None:
    assert rules(HERMES if choice else "a template without calls", **choice) is None


def test_a_required_call_is_one_of_the_tools(post) -> None:
    ask = {"messages": QUESTION, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 4}
    choice = post(CHAT, ask | {"max_tokens": 80}).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (call,) = choice["message"]["tool_calls"]
    assert call.keys() == {"id", "type", "function"}
    expected = {"weather": [{"city": "Oslo"}, {"city": "Ålesund"}], "now": [{}]}
    assert json.loads(call["function"]["arguments"]) in expected[call["function"]["name"]]


def test_a_named_call_streams_its_arguments(served) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        asked: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "tool_choice": named}
        whole = client.chat.completions.create(**asked, seed=1, max_tokens=60).choices[0]
        stream = client.chat.completions.create(**asked, seed=1, max_tokens=60, stream=True)
        added = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, call.function.name) == ("stop", "weather")
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Ålesund")
    assert added[0].function.name == "weather"
    assert added[0].id
    assert all(each.function.name is None for each in added[1:])
    assert "".join(each.function.arguments for each in added) == call.function.arguments


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"tool_choice": "required"}, "tool_choice: got 'required', expected tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS}, "expected one of the tools"),
        ({"tools": [{"type": "function"}]}, "tools: got .*expected a function with a name"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex: .*beside tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"function": "weather"}}, "expected one of the tools"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": ["weather"]}}}, "expected one of the tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice: got 'any'"),
    ],
)
def test_what_cannot_be_called_is_refused(asked: dict[str, Any], named: str, post) -> None:
    refusal = post(CHAT, {"messages": QUESTION, **asked})
    assert refusal.status_code == 400
    assert re.search(named, refusal.json()["error"]["message"])


def test_a_tool_without_a_name_is_refused_before_the_template_sees_it() -> None:
    with pytest.raises(RequestError, match="expected a function with a name"):
        read_tools(ToolChoice(), ChatCompletionRequest(messages=QUESTION, tools=[{}]), ChatTemplate(HERMES, {}))
