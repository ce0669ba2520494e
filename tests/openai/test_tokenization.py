"""Tokens must be transformers' own: the router's hashes depend on each one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastokens
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvist.errors import InvalidValueError
from kvist.openai.errors import RequestError
from kvist.openai.requests import ChatCompletionRequest
from kvist.openai.tokenization import ChatTokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city <today> & tomorrow – in °C",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "abc123456", "type": "function", "function": {"arguments": {"city": "Malmö"}, "name": "get_weather"}}

SYSTEM = {"role": "system", "content": "You are terse.  Answer in one word.\n"}
TURNS = [
    {"role": "user", "content": "What's the weather, <b>really</b>?"},
    {"role": "assistant", "content": "<think>\nHm, clouds.\n</think>\n\nGrey  "},
    {"role": "user", "content": "  And tomorrow?\n\n"},
    {"role": "assistant", "content": "Sun."},
    {"role": "user", "content": "Tack så mycket 🌞 <|im_end|> [INST] <start_of_turn>"},
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": TURNS[:1],
    "system prompt": [SYSTEM, *TURNS[:1]],
    "multi-turn": [SYSTEM, *TURNS],
    "ends with the assistant": TURNS[:4],
}


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.load(model_dir)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [TOOL], [TOOL, TOOL]], ids=["no tools", "one tool", "two tools"])
@pytest.mark.parametrize("thinking", [None, False], ids=["", "thinking off"])
def test_a_chat_has_the_tokens_that_transformers_gives_it(
    tokenizer: ChatTokenizer, oracle: PreTrainedTokenizerFast, name: str, tools: Any, thinking: bool | None
) -> None:
    options = {} if thinking is None else {"enable_thinking": thinking}
    expected = oracle.apply_chat_template(
        CONVERSATIONS[name], tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False, **options
    )
    request = ChatCompletionRequest(messages=CONVERSATIONS[name], tools=tools, chat_template_kwargs=options or None)
    assert tokenizer.tokenize_chat(request).tolist() == expected
    assert tokenizer.tokenize_chat(request).tolist() == expected  # and again, from the cache


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"], indirect=True)
def test_a_call_of_a_tool_is_rendered_as_an_object_though_openai_sends_a_string(
    tokenizer: ChatTokenizer, oracle: PreTrainedTokenizerFast
) -> None:
    turns = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    sent = json.loads(json.dumps(turns))
    sent[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(CALL["function"]["arguments"])
    expected = oracle.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.tokenize_chat(ChatCompletionRequest(messages=sent)).tolist() == expected


def test_text_in_parts_is_the_same_prompt_as_plain_text(tokenizer: ChatTokenizer) -> None:
    plain = ChatCompletionRequest(messages=[{"role": "user", "content": "one two"}])
    parts = ChatCompletionRequest(messages=[{"role": "user", "content": [{"type": "text", "text": "one two"}]}])
    assert tokenizer.tokenize_chat(parts).tolist() == tokenizer.tokenize_chat(plain).tolist()


def test_refusals_and_thoughts_in_parts_are_text(tokenizer: ChatTokenizer) -> None:
    plain, thought, refusal = [
        ChatCompletionRequest(messages=[TURNS[0], {"role": "assistant", "content": [{"type": kind, kind: "one"}]}])
        for kind in ("text", "thinking", "refusal")
    ]
    expected = tokenizer.tokenize_chat(plain).tolist()
    assert [tokenizer.tokenize_chat(each).tolist() for each in (thought, refusal)] == [expected] * 2


def test_a_continued_message_ends_where_its_text_ends(
    tokenizer: ChatTokenizer, oracle: PreTrainedTokenizerFast
) -> None:
    turns = [TURNS[0], {"role": "assistant", "content": "It is rather"}]
    expected = oracle.apply_chat_template(turns, continue_final_message=True, tokenize=True, return_dict=False)
    request = ChatCompletionRequest(messages=turns, continue_final_message=True, add_generation_prompt=False)
    assert tokenizer.tokenize_chat(request).tolist() == expected


def test_a_text_prompt_starts_with_the_special_tokens_of_the_model(
    tokenizer: ChatTokenizer, oracle: PreTrainedTokenizerFast
) -> None:
    text = "The quick brown fox – naïve"
    assert tokenizer.tokenize_text(text).tolist() == oracle(text).input_ids


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_text_has_the_tokens_that_transformers_gives_it(
    tokenizer: ChatTokenizer, oracle: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    pieces = [
        *oracle.get_added_vocab(),
        " ",
        "   ",
        "\n",
        "\r\n\t",
        "'ll",
        "ǅ",
        "e\u0301",
        "\u200d",
        "1234",
        "▁",
        "the",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces) | st.text(max_size=12), max_size=12)))
    add = data.draw(st.booleans())
    made = tokenizer.tokenize_text(text, add_special_tokens=add)
    assert made.dtype == np.uint32
    assert made.tolist() == oracle(text, add_special_tokens=add).input_ids


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_tokens_of_cached_turns_equal_a_full_tokenisation(
    tokenizer: ChatTokenizer, oracle: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    """Any text, special tokens and half ones in it, any history: the cache is invisible."""
    pieces = st.sampled_from([*oracle.get_added_vocab(), " ", "\n", "<|im_", "[INST", "<", "the ", "naïve", "▁"])
    content = st.lists(pieces | st.text(max_size=8), max_size=8).map("".join)
    contents = data.draw(st.lists(content, min_size=1, max_size=5))
    messages = [
        {"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(contents)
    ]
    for num_turns in range(1, len(messages) + 1):
        expected = oracle.apply_chat_template(
            messages[:num_turns], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert tokenizer.tokenize_chat(ChatCompletionRequest(messages=messages[:num_turns])).tolist() == expected


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_a_new_turn_tokenises_only_itself(tokenizer: ChatTokenizer) -> None:
    history = [{"role": "user", "content": "first " * 200}, {"role": "assistant", "content": "answer"}]
    tokenizer.tokenize_chat(ChatCompletionRequest(messages=history[:2]))
    before = tokenizer._fast.segment_cache_stats()
    tokenizer.tokenize_chat(ChatCompletionRequest(messages=[*history, {"role": "user", "content": "second"}]))
    after = tokenizer._fast.segment_cache_stats()
    assert after["hit_bytes"] - before["hit_bytes"] > 1200
    assert after["miss_bytes"] - before["miss_bytes"] < 100


RightTokenizer = fastokens.Tokenizer


class OtherTokens:
    """Stands in for a fastokens that is wrong about one kind of text."""

    def __init__(self, json: str, text: str) -> None:
        self._right, self._text = RightTokenizer.from_json_str(json), text
        self.enable_segment_cache = self._right.enable_segment_cache

    def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
        token_ids, offsets = self._right.encode_batch_flat(texts, add_special_tokens)
        return (token_ids[:-4] if self._text in texts[0] else token_ids), offsets


def without_fastokens(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "fastokens", None)


def with_other_tokens_of(text: str) -> Callable[[pytest.MonkeyPatch], None]:
    stub = SimpleNamespace(from_json_str=lambda json: OtherTokens(json, text))
    return lambda patch: patch.setattr(fastokens, "Tokenizer", stub)


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        (without_fastokens, "import of fastokens halted"),
        (with_other_tokens_of("\u3000"), "other tokens of ' two  spaces"),
        (with_other_tokens_of("<|im_end|>"), "other tokens of '<|im_start|><|im_end|>"),
    ],
    ids=["not installed", "wrong about spaces", "wrong about special tokens"],
)
def test_tokenizers_makes_the_tokens_where_fastokens_cannot_and_one_warning_says_so(
    model_dir: Path,
    oracle: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    breaks: Callable[[pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    breaks(monkeypatch)
    loaded = ChatTokenizer.load(model_dir)
    text = "\u3000 two <|im_end|>"
    assert loaded.tokenize_text(text).tolist() == loaded.tokenize_text(text).tolist() == oracle(text).input_ids
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert reason in caplog.text


@pytest.mark.parametrize("family", ["mistral"], indirect=True)
def test_a_tokeniser_that_fastokens_does_not_know_is_named_in_the_warning(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ChatTokenizer.load(model_dir)
    assert "Metaspace" in caplog.text


def test_half_of_a_surrogate_pair_is_the_clients_error(tokenizer: ChatTokenizer) -> None:
    for text in ("\ud800", "a \udfff b"):
        with pytest.raises(RequestError, match="half of a surrogate pair") as caught:
            tokenizer.tokenize_text(text)
        assert caught.value.status == 400


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(min_value=0, max_value=399), max_size=40))
def test_text_streamed_token_by_token_is_the_text_of_the_whole(
    tokenizer: ChatTokenizer, oracle: PreTrainedTokenizerFast, ids: list[int]
) -> None:
    stream = tokenizer.detokenizer()
    streamed = "".join(stream.step(token_id) for token_id in ids) + stream.flush()
    assert streamed == oracle.backend_tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("family", ["gemma"], indirect=True)
def test_a_refusing_template_is_the_clients_error_in_the_templates_words(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        tokenizer.tokenize_chat(ChatCompletionRequest(messages=[TURNS[0], TURNS[2]]))
    assert caught.value.status == 400


def test_messages_of_the_wrong_shape_are_the_clients_error(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(RequestError):
        tokenizer.tokenize_chat(ChatCompletionRequest(messages=[{"role": "user"}, {"content": 5}]))


def test_a_directory_without_a_tokeniser_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"tokenizer\.json"):
        ChatTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidValueError, match=r"tokenizer\.json"):
        ChatTokenizer.load(tmp_path)


@pytest.mark.parametrize("template", [b"{% for %}", b"\xff\xfe{{ messages }}"])
def test_a_template_that_cannot_be_read_is_named(model_dir: Path, tmp_path: Path, template: bytes) -> None:
    (tmp_path / "tokenizer.json").write_text((model_dir / "tokenizer.json").read_text())
    (tmp_path / "chat_template.jinja").write_bytes(template)
    with pytest.raises(InvalidValueError, match=r"chat.template"):
        ChatTokenizer.load(tmp_path)


def test_a_template_cannot_reach_the_interpreter(model_dir: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((model_dir / name).read_text())
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[-1].__subclasses__() }}")
    with pytest.raises(RequestError, match="unsafe"):
        ChatTokenizer.load(tmp_path).tokenize_chat(ChatCompletionRequest(messages=TURNS[:1]))
