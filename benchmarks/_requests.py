"""Requests of five APIs that show how an engine makes a prompt of their fields; each has a text of its own."""

from __future__ import annotations

from itertools import count
from typing import Any

CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"

FIELDS_TEMPLATE = """\
{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}<|{{ message.role }} {{ message.name }}|>{{ message.content }}
{%- if message.reasoning_content %}<thought>{{ message.reasoning_content }}</thought>{% endif %}
{%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}({{ message.tool_call_id }})
{% endfor %}{% if add_generation_prompt %}<|assistant {{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}|>
{%- endif %}"""
"""A chat template that shows all that a request's prompt may depend on.

It marks no thoughts as a model that thinks would: SGLang repeats these only with such a model's `--reasoning-parser`.
"""

_WORDS = "the cache holds blocks of tokens that requests share and a router sends each to where its prefix is "
_SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
_FUNCTION = {"name": "f", "description": "does f", "parameters": _SCHEMA}
_CHAT_TOOL = {"type": "function", "function": _FUNCTION}
_TWO_TOOLS = [{"type": "function", "function": _FUNCTION | {"name": "g"}}, _CHAT_TOOL]
_MESSAGES_TOOL = {"name": "f", "description": "does f", "input_schema": _SCHEMA}
_RESPONSES_TOOL = {"type": "function", **_FUNCTION}
_ARGUMENTS = {"name": "f", "arguments": '{"x": 1}'}
_ODD_ARGUMENTS = {"arguments": '{"z": [1, 2.50, null], "a": "ö"}', "name": "f"}
_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
_numbers = count(1)

Json = dict[str, Any]


def _words() -> str:
    """Return a text of several blocks that no other request has."""
    return f"text {next(_numbers)} {_WORDS * 6}"


def _user(content: Any = None) -> Json:
    return {"role": "user", "content": _words() if content is None else content}


def _system(role: str = "system") -> Json:
    return {"role": role, "content": _words()}


def _assistant(content: Any, **fields: Any) -> Json:
    return {"role": "assistant", "content": content, **fields}


def _text(text: str | None = None, kind: str = "text") -> Json:
    return {"type": kind, "text": _words() if text is None else text}


def _chat(*messages: Json, **fields: Any) -> tuple[str, Json]:
    return CHAT, {"model": "m", "max_tokens": 4, "temperature": 0, "messages": messages, **fields}


def _messages(*messages: Json, **fields: Any) -> tuple[str, Json]:
    return MESSAGES, {"model": "m", "max_tokens": 4, "temperature": 0, "messages": messages, **fields}


def _response(*items: Json, **fields: Any) -> tuple[str, Json]:
    """Return a request to the Responses API: of the items, or of a text if there are none."""
    return RESPONSES, {"model": "m", "max_output_tokens": 4, "temperature": 0, "input": items or _words(), **fields}


def _call(content: str | None, function: Json) -> Json:
    return _assistant(content, tool_calls=[{"id": "c1", "type": "function", "function": function}])


def _result(content: Any = None, **fields: Any) -> Json:
    return {"role": "tool", "tool_call_id": "c1", "content": _words() if content is None else content, **fields}


def _tool_use(**arguments: Any) -> Json:
    return {"type": "tool_use", "id": "t1", "name": "f", "input": arguments}


def _tool_result(**content: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": "t1", **content}


def _function_call(call_id: str = "c1", arguments: str = '{"x": 1}') -> Json:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": arguments}


def _function_output(output: Any, call_id: str = "c1") -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def _said(*texts: str) -> Json:
    content = [_text(text, "output_text") for text in texts]
    return {"type": "message", "role": "assistant", "content": content}


REQUESTS = {
    "completion": (COMPLETION, {"model": "m", "prompt": _words(), "max_tokens": 4}),
    "completion with a suffix": (COMPLETION, {"model": "m", "prompt": _words(), "suffix": "x", "max_tokens": 4}),
    "generate": (GENERATE, {"text": _words(), "sampling_params": {"max_new_tokens": 4}}),
    "chat": _chat(_user()),
    "chat, developer": _chat(_system("developer"), _user("x")),
    "chat, two systems": _chat(_system(), _system(), _user("x")),
    "chat, parts": _chat(_user([_text(), _text()])),
    "chat, empty part": _chat(_user([_text(""), _text()]), _assistant([_text("a"), _text("b")]), _user()),
    "chat, image": _chat(
        _user([_text(), {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_PIXEL}"}}])
    ),
    "chat, name": _chat(_user() | {"name": "bob"}),
    "chat, reasoning": _chat(_user(), _assistant("yes", reasoning_content=_words()), _user()),
    "chat, effort": _chat(_user(), reasoning_effort="low"),
    "chat, no effort": _chat(_user(), reasoning_effort="none"),
    "chat, kwargs": _chat(_user(), chat_template_kwargs={"enable_thinking": False}, reasoning_effort="high"),
    "chat, empty assistant": _chat(_user(), _assistant(""), _user()),
    "chat, last of the assistant": _chat(_user(), _assistant(_words())),
    "chat, continued": _chat(_user(), _assistant(_words()), continue_final_message=True, add_generation_prompt=False),
    "chat, tool": _chat(_user(), tools=[_CHAT_TOOL]),
    "chat, not a strict tool": _chat(_user(), tools=[{"type": "function", "function": {"strict": False} | _FUNCTION}]),
    "chat, odd tools": _chat(
        _user(),
        tools=[
            {"function": {"parameters": {"type": "object"}, "name": "f"}, "type": "function"},
            {"type": "function", "function": {"name": "g"}, "defer_loading": True},
        ],
    ),
    "chat, no tool may be called": _chat(_user(), tools=[_CHAT_TOOL], tool_choice="none"),
    "chat, one tool": _chat(_user(), tools=_TWO_TOOLS, tool_choice={"type": "function", "function": {"name": "f"}}),
    "chat, tool result": _chat(_user(), _call(None, _ARGUMENTS), _result(), tools=[_CHAT_TOOL]),
    "chat, tool result in parts": _chat(
        _user(), _call(None, _ARGUMENTS), _result([_text(), _text("b")]), tools=[_CHAT_TOOL]
    ),
    "chat, empty tool result": _chat(_user(), _call(None, _ARGUMENTS), _result(""), _user()),
    "chat, odd arguments": _chat(_user(), _call("x", _ODD_ARGUMENTS), _result(name="f")),
    "messages": _messages(_user()),
    "messages, system": _messages(_user(), system=_words()),
    "messages, system in blocks": _messages(
        _user(), system=[_text(), _text() | {"cache_control": {"type": "ephemeral"}}]
    ),
    "messages, billing": _messages(
        _user(), system=[_text("x-anthropic-billing-header: cc_version=2.1; cch=abc"), _text(), _text()]
    ),
    "messages, blank system": _messages(_user(), system="  "),
    "messages, empty system block": _messages(_user(), system=[_text("")]),
    "messages, system between": _messages(
        _user(), _assistant("ok"), {"role": "system", "content": f" {_words()}"}, _user(), system=_words()
    ),
    "messages, blocks": _messages(_user([_text(), _text()])),
    "messages, turns": _messages(_user(), _assistant([_text()]), _user(), system=_words()),
    "messages, empty assistant": _messages(_user(), _assistant([]), _user()),
    "messages, last of the assistant": _messages(_user(), _assistant(_words())),
    "messages, thinking": _messages(
        _user(),
        _assistant([{"type": "thinking", "thinking": _words(), "signature": "s"}, _text("ok")]),
        _user(),
    ),
    "messages, no thinking": _messages(_user(), thinking={"type": "disabled"}),
    "messages, effort": _messages(_user(), output_config={"effort": "xhigh"}),
    "messages, tool": _messages(_user(), tools=[_MESSAGES_TOOL]),
    "messages, tool choice": _messages(_user(), tools=[_MESSAGES_TOOL], tool_choice={"type": "auto"}),
    "messages, no tool may be called": _messages(_user(), tools=[_MESSAGES_TOOL], tool_choice={"type": "none"}),
    "messages, one tool": _messages(
        _user(), tools=[_MESSAGES_TOOL | {"name": "g"}, _MESSAGES_TOOL], tool_choice={"type": "tool", "name": "f"}
    ),
    "messages, odd tools": _messages(
        _user(),
        tools=[
            {"input_schema": {"properties": {}}, "name": "g"},
            {"name": "h", "description": "x", "input_schema": {"type": "object"}, "strict": True},
            {"name": "w", "description": "x", "input_schema": {"type": "object"}, "defer_loading": False},
        ],
    ),
    "messages, server's tool": _messages(_user(), tools=[{"type": "bash_20250124", "name": "bash"}, _MESSAGES_TOOL]),
    "messages, tool result": _messages(
        _user(),
        _assistant([_text("ok"), _tool_use(x=1)]),
        _user([_tool_result(content=_words()), _text()]),
        tools=[_MESSAGES_TOOL],
    ),
    "messages, tool result in blocks": _messages(
        _user(),
        _assistant([_tool_use(x=1)]),
        _user([_tool_result(content=[_text(), _text("b")])]),
        tools=[_MESSAGES_TOOL],
    ),
    "messages, tool references": _messages(
        _user(),
        _assistant([_tool_use(x=1)]),
        _user([_tool_result(content=[{"type": "tool_reference", "tool_name": "f"}]), _text()]),
        tools=[_MESSAGES_TOOL | {"defer_loading": True}],
    ),
    "messages, tools that come and go": _messages(
        _user(),
        _system()
        | {
            "content": [
                {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}},
                {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "g"}},
            ]
        },
        _user(),
        tools=[_MESSAGES_TOOL | {"defer_loading": True}, _MESSAGES_TOOL | {"name": "g"}],
    ),
    "messages, odd arguments": _messages(
        _user(), _assistant([_tool_use(b=1, a="ö")]), _user([_tool_result(content=[_text()])]), tools=[_MESSAGES_TOOL]
    ),
    "messages, tool result between texts": _messages(
        _user(),
        _assistant([_text("a"), _text("b"), _tool_use()]),
        _user([_text(), _tool_result(), _text(), _text("")]),
        tools=[_MESSAGES_TOOL],
    ),
    "response": _response(),
    "response, instructions": _response(instructions=_words()),
    "response, items": _response(
        _user(), _assistant("ok"), _user([_text(kind="input_text"), _text(kind="input_text")])
    ),
    "response, developer": _response(_system("developer"), _user()),
    "response, effort": _response(reasoning={"effort": "high"}),
    "response, no effort": _response(reasoning={"effort": "none"}),
    "response, tool": _response(tools=[_RESPONSES_TOOL]),
    "response, no tool may be called": _response(tools=[_RESPONSES_TOOL], tool_choice="none"),
    "response, one tool": _response(
        tools=[_RESPONSES_TOOL | {"name": "g"}, _RESPONSES_TOOL], tool_choice={"type": "function", "name": "f"}
    ),
    "response, odd tools": _response(
        tools=[
            {"type": "function", "name": "f", "parameters": None, "strict": True},
            {"type": "function", "name": "g", "description": "d"},
        ]
    ),
    "response, tool result": _response(
        _user(), _function_call(), _function_output(_words()), _user(), tools=[_RESPONSES_TOOL]
    ),
    "response, summaries and other tools": _response(
        _user(),
        {"type": "custom_tool_call", "call_id": "c1", "name": "p", "input": _words()},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": _words()},
        reasoning={"summary": "auto"},
        tools=[
            _RESPONSES_TOOL,
            {"type": "custom", "name": "p", "description": "does p"},
            {"type": "namespace", "name": "n", "description": "", "tools": [_RESPONSES_TOOL]},
            {"type": "web_search"},
        ],
    ),
    "response, reasoning": _response(
        _user(),
        {"type": "reasoning", "summary": [_text("hm", "summary_text")], "content": []},
        _said(_words(), "two"),
        _user(),
    ),
    "response, items to merge": _response(
        _user(),
        _said("said"),
        _said("more"),
        _function_call("c1", "{}"),
        _function_call("c2", "nonsense"),
        _function_output([_text(kind="input_text"), _text("x", "input_text")], "c1"),
        _function_output("y", "c2"),
        {"role": "developer", "content": [_text(kind="input_text"), _text("z", "input_text")]},
        _user(),
        instructions=_words(),
    ),
}
"""The path and the body of each request."""


def num_cached_tokens(answer: Json) -> int:
    """Return how many tokens of its prompt an answer of any of the APIs says were cached, 0 if it does not say."""
    usage = answer.get("usage") or answer.get("meta_info") or {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return usage.get("cache_read_input_tokens") or details.get("cached_tokens") or usage.get("cached_tokens") or 0
