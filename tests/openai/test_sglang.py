"""Requests are rendered as SGLang 0.5.23 does it, by examples; `benchmarks/verify_servers.py` asks a real one."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest

from kvist.openai.chats import FREE_TEXT, MESSAGES_PATH, RESPONSES_PATH
from kvist.openai.errors import RequestError
from kvist.openai.requests import ChatCompletionRequest, convert
from kvist.openai.sglang import SglangTemplate, chat_of

TEXT = """\
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}<{{ message.role }}{{ ' ' ~ message.name if message.name }}>\
{{ message.content }}{{ message.reasoning_content }}\
{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ message.tool_call_id }}
{% endfor %}{{ '<assistant>' if add_generation_prompt }}{{ thinking }}{{ enable_thinking }}{{ reasoning_effort }}"""
"""Takes contents as text, and shows all that it is given."""

PARTS = """\
{% if messages[1:] | selectattr('role', 'equalto', 'system') | list %}{{ raise_exception('system first') }}{% endif %}\
{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}{% else %}\
{% for part in message.content %}[{{ part.text }}{{ part.name }}]{% endfor %}{% endif %}{{ '\n' }}\
{% endfor %}{{ '<assistant>' if add_generation_prompt }}"""
"""Takes contents as parts, and one system message, at the start."""

PACKED = "sglang-reasoning-v1." + base64.urlsafe_b64encode(zlib.compress(b"hm")).decode()
FOUND = {"type": "tool_reference", "tool_name": "f"}
PARAMETERS = {"properties": {}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"q": 1}'}}
SHOWN_CALL = '{"id": "c", "index": null, "type": "function", "function": {"name": "f", "arguments": {"q": 1}}}'

SHOWN_FREE_CALL = SHOWN_CALL.replace('"q": 1', '"input": "b"')


def part(text: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def said(*contents: Any) -> list[dict[str, Any]]:
    """Turns of user and assistant."""
    return [{"role": ("user", "assistant")[idx % 2], "content": content} for idx, content in enumerate(contents)]


def rendered(api: str | None, body: dict[str, Any], source: str = TEXT) -> str:
    template = SglangTemplate(source, {})
    return template.render(convert(body, ChatCompletionRequest) if api is None else chat_of(api, body, template))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": said([part("a"), part(""), part("b")])}, "<user>a  b\n<assistant>"),
        ({"messages": [{"role": "developer", "content": "a"}, *said("b")]}, "<developer>a\n<user>b\n<assistant>"),
        ({"messages": [{"role": "user", "name": "bob", "content": "a"}]}, "<user>a\n<assistant>"),
        ({"messages": [{"role": "system", "name": "bob", "content": "a"}]}, "<system bob>a\n<assistant>"),
        ({"messages": said("a", "b")}, "<user>a\n<user>b\n<assistant>"),
        ({"messages": said("a", "b"), "continue_final_message": True}, "<user>a\n<assistant>b"),
        ({"messages": said("a"), "continue_final_message": True}, "<user>a\n<assistant>"),
        ({"messages": said("a", [part("b"), part("c")])}, "<user>a\n<user>b c\n<assistant>"),
        ({"messages": said("a", None)[1:], "continue_final_message": False}, "<user>\n<assistant>"),
        (
            {"messages": [*said("a"), {"role": "assistant", "content": None, "tool_calls": [CALL]}, *said("b")]},
            f"<user>a\n<assistant>{SHOWN_CALL}\n<user>b\n<assistant>",
        ),
        (
            {"messages": [*said("a"), {"role": "tool", "tool_call_id": "c", "content": [part("b"), part("c")]}]},
            "<user>a\n<tool>b cc\n<assistant>",
        ),
        ({"messages": said("a"), "reasoning_effort": "none"}, "<user>a\n<assistant>FalseFalsenone"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": "a", "reasoning": "no", "reasoning_content": "hm"},
                    *said("b"),
                ]
            },
            "<assistant>ahm\n<user>b\n<assistant>",
        ),
        (
            {"messages": said("a"), "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "<user>a\n<assistant>TrueFalselow",
        ),
        (
            {"messages": said("a"), "tools": [{"function": {"parameters": {}, "name": "f"}, "type": "function"}]},
            '{"type": "function", "function": {"parameters": {}, "name": "f", "description": null}, '
            '"defer_loading": null}\n<user>a\n<assistant>',
        ),
        (
            {"messages": said("a"), "tools": [{"function": {"name": "f", "strict": False}, "defer_loading": True}]},
            '{"type": "function", "function": {"name": "f", "strict": false, "description": null, "parameters": null, '
            '"defer_loading": true}, "defer_loading": true}\n<user>a\n<assistant>',
        ),
    ],
)
def test_chats(body: dict[str, Any], text: str) -> None:
    assert rendered(None, body) == text


NAMED = [{"name": name, "description": "", "parameters": {}} for name in "fg"]


@pytest.mark.parametrize(
    ("api", "body", "choices"),
    [
        (
            None,
            {"messages": said("a"), "tools": [{"type": "function", "function": each} for each in NAMED]},
            ["none", {"type": "function", "function": {"name": "g"}}, "required"],
        ),
        (
            MESSAGES_PATH,
            {"messages": said("a"), "tools": [{"name": each["name"], "input_schema": {}} for each in NAMED]},
            [{"type": "none"}, {"type": "tool", "name": "g"}, {"type": "any"}],
        ),
        (
            RESPONSES_PATH,
            {"input": "a", "tools": [{"type": "function", **each} for each in NAMED]},
            ["none", {"type": "function", "name": "g"}, {"type": "mcp", "name": "g"}],
        ),
    ],
)
def test_tools_that_may_not_be_called_are_not_shown(api: str | None, body: dict[str, Any], choices: list[Any]) -> None:
    shown = [rendered(api, body | {"tool_choice": choice}) for choice in choices]
    assert [[name for name in "fg" if f'"name": "{name}"' in text] for text in shown] == [[], ["g"], ["f", "g"]]


def test_a_choice_of_another_form_names_no_tool() -> None:
    body = {"messages": said("a"), "tools": [{"type": "function", "function": "f"}]}
    assert rendered(None, body | {"tool_choice": {"type": "function", "function": ["f"]}})
    body = {"messages": said("a"), "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert rendered(None, body | {"tool_choice": {"type": "function", "function": "f"}}) == "<user>a\n<assistant>"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"system": [part("a"), part("b")], "messages": said("c")}, "<system>a\nb\n<user>c\n<assistant>"),
        (
            {"system": [part("x-anthropic-billing-header: 1"), part("a")], "messages": said("b")},
            "<system>x-anthropic-billing-header: 1\na\n<user>b\n<assistant>",
        ),
        ({"system": "  ", "messages": said("a")}, "<user>a\n<assistant>"),
        (
            {"system": "a", "messages": [*said("b", "c"), {"role": "system", "content": " d"}, *said("e")]},
            "<system>a\n<user>b\n<assistant>c\n<system> d\n<user>e\n<assistant>",
        ),
        (
            {
                "messages": said(
                    "a",
                    [part("b"), part("c"), {"type": "tool_use", "id": "c", "name": "f", "input": {"q": 1}}],
                    [
                        part("d"),
                        {"type": "tool_result", "tool_use_id": "c", "content": [part("e"), part("f")]},
                        part("g"),
                    ],
                )
            },
            f"<user>a\n<assistant>b c{SHOWN_CALL}\n<user>d\n<tool>e fc\n<user>g\n<assistant>",
        ),
        (
            {"messages": said([{"type": "tool_result", "tool_use_id": "c", "content": [FOUND, FOUND, part("a")]}])},
            "<tool>c\n<tool>ac\n<assistant>",
        ),
        ({"messages": said("a", [], "b")}, "<user>a\n<assistant>\n<user>b\n<assistant>"),
        ({"messages": said("a"), "output_config": {"effort": "xhigh"}}, "<user>a\n<assistant>TrueTruemax"),
        ({"messages": said("a"), "thinking": {"type": "disabled"}}, "<user>a\n<assistant>FalseFalse"),
        (
            {"messages": said("a"), "tools": [{"type": "bash_20250124"}, {"input_schema": PARAMETERS, "name": "f"}]},
            '{"type": "function", "function": {"name": "f", "description": "", "parameters": {"properties": {}, '
            '"type": "object"}, "strict": false}, "defer_loading": null}\n<user>a\n<assistant>',
        ),
    ],
)
def test_messages_of_anthropics_api(body: dict[str, Any], text: str) -> None:
    assert rendered(MESSAGES_PATH, body) == text


def test_thoughts_are_repeated_where_the_template_knows_thoughts() -> None:
    body = {"messages": said("a", [{"type": "thinking", "thinking": "hm"}, part("b")], "c")}
    assert rendered(MESSAGES_PATH, body) == "<user>a\n<assistant>b\n<user>c\n<assistant>"
    thoughtful = TEXT + "{# </think> #}"
    assert "<assistant><think>hm\n</think> b\n" in rendered(MESSAGES_PATH, body, thoughtful)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"instructions": "a", "input": "b"}, "<system>a\n<user>b\n<assistant>"),
        (
            {
                "input": [
                    {"role": "developer", "content": [part("a", "input_text"), part("b", "input_text")]},
                    *said("c"),
                ]
            },
            "<system>Developer instructions:\na b\n<user>c\n<assistant>",
        ),
        (
            {
                "input": [
                    *said("a"),
                    {"type": "reasoning", "summary": [part("hm", "summary_text")], "content": [part("x")]},
                    {"role": "assistant", "content": [part("b", "output_text")]},
                    {"role": "assistant", "content": [part("c", "output_text")]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"q": 1}'},
                    {"type": "function_call_output", "call_id": "c", "output": [part("d"), part("e")]},
                    {"type": "reasoning", "summary": []},
                ]
            },
            f"<user>a\n<assistant>b chm{SHOWN_CALL}\n<tool>dec\n<assistant>",
        ),
        (
            {"input": said("a", "b") + said("c", "d")[1:] + said("e")},
            "<user>a\n<assistant>b\n\nd\n<user>e\n<assistant>",
        ),
        ({"input": "a", "reasoning": {"effort": "none"}}, "<user>a\n<assistant>FalseFalsenone"),
        ({"input": "a", "reasoning": {"summary": "auto"}}, "<user>a\n<assistant>TrueTruemedium"),
        (
            {
                "input": [
                    {"type": "reasoning", "summary": [], "encrypted_content": PACKED},
                    {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "b"},
                    {"type": "custom_tool_call_output", "call_id": "c", "output": "d"},
                    {"type": "reasoning", "summary": [], "encrypted_content": "sglang-reasoning-v1.hm"},
                ]
            },
            f"<assistant>hm{SHOWN_FREE_CALL}\n<tool>dc\n<assistant>",
        ),
        (
            {
                "input": "a",
                "tools": [
                    {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
                    {"type": "web_search"},
                    {
                        "type": "custom",
                        "name": "f",
                        "description": "b",
                        "format": {"type": "grammar", "definition": "c"},
                    },
                ],
            },
            '{"type": "function", "function": {"name": "f", "description": "b\\n\\nThe payload must conform to this '
            f'lark grammar:\\nc", "parameters": {json.dumps(FREE_TEXT)}, "strict": false}}, "defer_loading": null}}\n'
            "<user>a\n<assistant>",
        ),
        (
            {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": True}]},
            '{"type": "function", "function": {"name": "f", "description": null, "parameters": {}, "strict": true}, '
            '"defer_loading": null}\n<user>a\n<assistant>',
        ),
    ],
)
def test_responses(body: dict[str, Any], text: str) -> None:
    assert rendered(RESPONSES_PATH, body) == text


def test_a_template_that_takes_parts_gets_texts_as_texts_and_one_system_message_at_the_start() -> None:
    chat = {"messages": [*said("a", [part("b"), part("c")], "d"), {"role": "tool", "content": [part("e"), part("f")]}]}
    assert rendered(None, chat, PARTS) == "<user>a\n<assistant>[b][c]\n<user>d\n<tool>e f\n<assistant>"
    result = {"type": "tool_result", "tool_use_id": "c", "content": [part("a"), FOUND, FOUND, part("b")]}
    assert rendered(MESSAGES_PATH, {"messages": said([result])}, PARTS) == "<tool>a\n<tool>[f][f]\n<tool>b\n<assistant>"
    later = {"system": "a", "messages": [*said("b"), {"role": "system", "content": " c"}]}
    assert rendered(MESSAGES_PATH, later, PARTS) == "<system>a\nc\n<user>b\n<assistant>"
    later = {"instructions": "a", "input": [*said("b"), {"role": "developer", "content": "c"}]}
    assert rendered(RESPONSES_PATH, later, PARTS) == "<system>a\n\nDeveloper instructions:\nc\n<user>b\n<assistant>"


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (None, {"messages": [{"role": "assistant", "tool_calls": 5}]}),
        (None, {"messages": [{"role": "user", "content": 5}]}),
        (MESSAGES_PATH, {"messages": said([{"type": "search_result"}])}),
        (MESSAGES_PATH, {"messages": said("a", [{"type": "redacted_thinking"}])}),
        (RESPONSES_PATH, {"input": [{"type": "item_reference", "id": "x"}]}),
        (RESPONSES_PATH, {"input": "a", "tools": [5]}),
    ],
)
def test_what_has_no_place_in_a_chat_is_refused(api: str | None, body: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        rendered(api, body)
