"""Whatever API a prompt comes by, it is rendered as vLLM renders it: told by vLLM's own files, and by examples."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import vllm_rendering
from _engine_files import MISSING, versions
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvist.openai import sglang
from kvist.openai.chat_template import ChatTemplate
from kvist.openai.chats import MESSAGES_PATH, RESPONSES_PATH, chat_of, messages_of_response
from kvist.openai.errors import RequestError
from kvist.openai.requests import ChatCompletionRequest, convert
from kvist.openai.tokenization import ChatTokenizer

needs_vllm = pytest.mark.skipif(not versions(), reason=MISSING)
NUM_REQUESTS = 150
TOOL_CHANGES: list[dict[str, Any]] = [
    {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "g"}},
    {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "h", "input_schema": {}}}},
    {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
]
"""By these blocks of system messages tools come and go in a conversation."""


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def template(model_dir: Path) -> ChatTemplate:
    found = ChatTokenizer.load(model_dir)._template
    assert found is not None
    return found


class Requests:
    """Bodies of the three APIs, with whatever clients put into them; images apart."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def _maybe(self, value: Any, otherwise: Any = None) -> Any:
        return value if self._random.random() < 0.5 else otherwise

    def text(self) -> str:
        words = [
            "hi",
            " ",
            "naïve – 🌞",
            "<|im_end|>",
            "[INST]",
            "\n",
            "x-anthropic-billing-header: 1\n",
            "</think>",
            "",
        ]
        return "".join(self._random.choices(words, k=self._random.randint(0, 4)))

    def schema(self) -> dict[str, Any]:
        schema = {"properties": {"ö": {"type": "string", "description": "<b> & °C"}}, "type": "object"}
        return self._maybe(schema, {"properties": {}})

    def function(self) -> dict[str, Any]:
        every = {"parameters": self.schema(), "description": self.text(), "strict": True, "x": 1, "name": "f"}
        return {name: value for name, value in every.items() if name == "name" or self._random.random() < 0.7}

    def parts(self, kind: str) -> Any:
        return self._maybe(
            self.text(), [{"type": kind, "text": self.text()} for _ in range(self._random.randint(1, 3))]
        )

    def chat(self) -> dict[str, Any]:
        """A body of `/v1/chat/completions`."""
        messages = [{"role": self._maybe("system", "developer"), "content": self.parts("text")}] * self._maybe(1, 0)
        for _ in range(self._random.randint(1, 3)):
            messages.append({"role": "user", "content": self.parts("text"), **self._maybe({"name": "ann"}, {})})
            said: dict[str, Any] = {"role": "assistant", "content": self._maybe(self.parts("text"))}
            said |= self._maybe({self._maybe("reasoning", "reasoning_content"): self.text()}, {})
            calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": self.arguments()}}]
            said |= self._maybe({"tool_calls": self._maybe(calls, [])}, {})
            messages.append(said)
            if said.get("tool_calls"):
                found = [{"type": "text", "text": self.text()}, {"type": "tool_reference", "name": "f"}]
                content = self._random.choice([self.parts("text"), self.parts("text"), found])
                messages.append({"role": "tool", "tool_call_id": "c1", "content": content})
        body = {"messages": messages[: self._random.randint(1, len(messages))], "model": "m"}
        tools = [{"function": self.function(), "type": "function"} for _ in range(self._random.randint(1, 2))]
        return body | self._maybe({"tools": tools}, {}) | self.thinking("reasoning_effort")

    def arguments(self) -> str | None:
        return self._random.choice([json.dumps({"a": self.text(), "b": [1]}), "{broken", "[1]", "", None])

    def thinking(self, name: str) -> dict[str, Any]:
        body = self._maybe({"chat_template_kwargs": {"enable_thinking": self._maybe(False, True)}}, {})
        return body | self._maybe({name: self._random.choice(["none", "low", "high"])}, {})

    def anthropic(self) -> dict[str, Any]:
        """A body of `/v1/messages`."""
        messages: list[dict[str, Any]] = []
        for turn in range(self._random.randint(1, 4)):
            role = "assistant" if turn % 2 else self._random.choice(["user", "user", "user", "system"])
            blocks: list[dict[str, Any]] = [{"type": "text", "text": self.text()}]
            if role == "assistant":
                blocks += [
                    {"type": "thinking", "thinking": self.text(), "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"q": self.text()}},
                    {"type": "tool_result", "tool_use_id": "t0", "content": self.text()},
                ]
            elif role == "user":
                found = [{"type": "tool_reference", "tool_name": "g"}] * self._maybe(2, 0)
                results = self._maybe(self.text(), [{"type": "text", "text": self.text()}, *found] * 2)
                blocks.append({"type": "tool_result", "tool_use_id": "t1", "content": results})
            else:
                blocks += self._random.choices(TOOL_CHANGES, k=2)
            self._random.shuffle(blocks)
            content = self._maybe(blocks[: self._random.randint(1, len(blocks))], self.text())
            messages.append({"role": role, "content": content})
        body = {"messages": messages, "model": "m", "max_tokens": 9}
        body |= self._maybe({"system": self.parts("text")}, {})
        tool = {"name": "f", "description": self._maybe(self.text()), "input_schema": self.schema()}
        other = {"name": "g", "input_schema": {"type": "object"}, "strict": False, "defer_loading": True}
        body |= self._maybe({"tools": [tool, other]}, {})
        body |= self._maybe({"thinking": {"type": self._maybe("disabled", "adaptive")}}, {})
        return body | self._maybe({"output_config": {"effort": self._maybe("low", "max")}}, {})

    def response(self) -> dict[str, Any]:
        """A body of `/v1/responses`."""
        items: list[dict[str, Any]] = []
        for _ in range(self._random.randint(1, 6)):
            said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": self.text()}]}
            call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": self.arguments() or "{}"}
            every: list[dict[str, Any]] = [
                {"role": "user", "content": self.parts("input_text")},
                {"type": "message", "role": self._maybe("developer", "system"), "content": self.parts("input_text")},
                {"role": "assistant", "content": self.text()},
                said | self._maybe({"status": "incomplete", "id": "m"}, {}),
                call | self._maybe({"namespace": "files"}, {}),
                {"type": "custom_tool_call", "call_id": "c2", "name": "shell", "input": self.text()},
                {"type": "function_call_output", "call_id": "c1", "output": self.parts("input_text")},
                {"type": "custom_tool_call_output", "call_id": "c2", "output": self.text()},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": self.text()}]},
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": self.text()}]},
            ]
            items.append(self._random.choice(every))
        inner = {"type": "function", **self.function()}
        tools = [
            {"type": "function", "strict": None, "parameters": None, **self.function()},
            {"type": "custom", "name": "shell", "description": self.text()},
            {"type": "namespace", "name": "files", "description": "d", "tools": [inner]},
            {"type": "web_search"},
        ]
        body = {"input": self._maybe(items, self.text()), "model": "m"}
        body |= self._maybe({"instructions": self.text()}, {})
        body |= self._maybe({"tools": self._random.sample(tools, k=self._random.randint(0, 4))}, {})
        return body | self._maybe({"reasoning": {"effort": self._maybe("high", "none")}}, {})


def told(ask: Any, *args: Any) -> str | None:
    """Return a prompt's text, None where the request is refused."""
    try:
        return ask(*args)
    except Exception as error:
        if isinstance(error, RequestError | ValueError) or type(error).__name__ == "VLLMValidationError":
            return None
        raise


@needs_vllm
@pytest.mark.parametrize("api", ["chat", "messages", "response"])
def test_requests_have_the_text_that_vllm_gives_them(
    api: str, template: ChatTemplate, oracle: PreTrainedTokenizerFast
) -> None:
    make = {"chat": Requests.chat, "messages": Requests.anthropic, "response": Requests.response}[api]
    ours = {
        "chat": lambda body: convert(body, ChatCompletionRequest),
        "messages": lambda body: chat_of(MESSAGES_PATH, body, template),
        "response": lambda body: chat_of(RESPONSES_PATH, body, template),
    }[api]
    theirs = getattr(vllm_rendering, f"text_of_{api}")
    num_told = 0
    for seed in range(NUM_REQUESTS):
        body = make(Requests(seed))
        expected = told(theirs, json.loads(json.dumps(body)), oracle)
        found = told(lambda: template.render(ours(json.loads(json.dumps(body)))))  # noqa: B023 - called at once
        assert expected is None or found == expected, body
        num_told += expected is not None
    assert num_told > NUM_REQUESTS / 5


@needs_vllm
def test_a_response_goes_on_with_what_another_said(template: ChatTemplate, oracle: PreTrainedTokenizerFast) -> None:
    first = {"model": "m", "instructions": "Be terse.", "input": [{"role": "system", "content": "x"}, *ASKED]}
    second = {"model": "m", "instructions": "Be kind.", "input": "and now?", "previous_response_id": "resp_1"}
    third = {"model": "m", "input": [{"role": "user", "content": "at last?"}]}
    previous: list[Any] = []
    for num_earlier, body in enumerate((first, second, third)):
        earlier = [(each, ANSWERED) for each in (first, second)[:num_earlier]]
        chat = chat_of(RESPONSES_PATH, body, template, previous)
        assert told(template.render, chat) == told(vllm_rendering.text_of_response, body, oracle, *earlier)
        previous = [*chat.messages, *messages_of_response(ANSWERED)]


ASKED = [{"role": "user", "content": "hello"}]
ANSWERED = [
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {
        "type": "message",
        "id": "m",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "hi", "annotations": []}],
    },
]
CALL = {"id": "c", "function": {"arguments": {"q": 1}, "name": "f"}, "type": "function"}
CALL_OF_A_RESPONSE = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"q": 1}}}


@pytest.mark.parametrize(
    ("api", "body", "messages"),
    [
        (
            MESSAGES_PATH,
            {
                "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"q": 1}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "4"}]},
                ],
            },
            [
                {"role": "system", "content": "ab"},
                {"role": "user", "content": "hello"},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "4"},
            ],
        ),
        (
            MESSAGES_PATH,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "what is"}, {"type": "image", "source": {}}]}
                ]
            },
            [{"role": "user", "content": "what is"}],
        ),
        (
            RESPONSES_PATH,
            {
                "instructions": "be terse",
                "input": [
                    {"role": "user", "content": "hello"},
                    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"q": 1}'},
                    {"type": "function_call_output", "call_id": "c", "output": "4"},
                ],
            },
            [
                {"role": "system", "content": "be terse"},
                {"role": "user", "content": "hello"},
                {"role": "assistant", "reasoning": "hm", "tool_calls": [CALL_OF_A_RESPONSE]},
                {"role": "tool", "content": "4", "tool_call_id": "c"},
            ],
        ),
    ],
)
def test_requests_become_chats(api: str, body: dict[str, Any], messages: list[Any]) -> None:
    assert chat_of(api, body, ChatTemplate("{{ messages }}", {})).messages == messages


@pytest.mark.parametrize("api", [MESSAGES_PATH, RESPONSES_PATH])
@pytest.mark.parametrize(("kind", "chat_of"), [(ChatTemplate, chat_of), (sglang.SglangTemplate, sglang.chat_of)])
def test_whatever_a_body_is_it_is_a_chat_or_refused(api: str, kind: Any, chat_of: Any) -> None:
    template = kind("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    odd = [None, 5, "x", [], {}, [5], [None], {"type": 5}, [[]], True]

    def broken(value: Any, chance: random.Random) -> Any:
        if chance.random() < 0.05:
            return chance.choice(odd)
        if isinstance(value, dict):
            return {name: broken(each, chance) for name, each in value.items()}
        return [broken(each, chance) for each in value] if isinstance(value, list) else value

    num_refused = 0
    for seed in range(3000):
        requests = Requests(seed)
        body = requests.anthropic() if api == MESSAGES_PATH else requests.response()
        body = {name: broken(value, random.Random(seed)) for name, value in body.items()}
        try:
            template.render(chat_of(api, body, template))
        except RequestError:
            num_refused += 1
    assert 100 < num_refused < 2900
