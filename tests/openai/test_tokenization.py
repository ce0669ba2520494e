"""Tokens must be transformers' own: the router's hashes depend on each one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvist.errors import InvalidValueError
from kvist.openai.errors import RequestError
from kvist.openai.requests import ChatCompletionRequest
from kvist.openai.tokenization import ChatTokenizer, cut_pattern, split_segments

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
    assert tokenizer.tokenize_chat(request) == expected
    assert tokenizer.tokenize_chat(request) == expected  # and again, from the cache


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"], indirect=True)
def test_a_call_of_a_tool_is_rendered_as_an_object_though_openai_sends_a_string(
    tokenizer: ChatTokenizer, oracle: PreTrainedTokenizerFast
) -> None:
    turns = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    sent = json.loads(json.dumps(turns))
    sent[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(CALL["function"]["arguments"])
    expected = oracle.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.tokenize_chat(ChatCompletionRequest(messages=sent)) == expected


def test_text_in_parts_is_the_same_prompt_as_plain_text(tokenizer: ChatTokenizer) -> None:
    plain = ChatCompletionRequest(messages=[{"role": "user", "content": "one two"}])
    parts = ChatCompletionRequest(messages=[{"role": "user", "content": [{"type": "text", "text": "one two"}]}])
    assert tokenizer.tokenize_chat(parts) == tokenizer.tokenize_chat(plain)


def test_a_continued_message_ends_where_its_text_ends(
    tokenizer: ChatTokenizer, oracle: PreTrainedTokenizerFast
) -> None:
    turns = [TURNS[0], {"role": "assistant", "content": "It is rather"}]
    expected = oracle.apply_chat_template(turns, continue_final_message=True, tokenize=True, return_dict=False)
    request = ChatCompletionRequest(messages=turns, continue_final_message=True, add_generation_prompt=False)
    assert tokenizer.tokenize_chat(request) == expected


def test_a_text_prompt_starts_with_the_special_tokens_of_the_model(
    tokenizer: ChatTokenizer, oracle: PreTrainedTokenizerFast
) -> None:
    text = "The quick brown fox – naïve"
    assert tokenizer.tokenize_prompt(text) == oracle(text).input_ids
    assert tokenizer.tokenize_prompt(text, add_special_tokens=False) == oracle(text, add_special_tokens=False).input_ids
    assert tokenizer.tokenize_prompt([5, 6, 7]) == [5, 6, 7]


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
        assert tokenizer.tokenize_chat(ChatCompletionRequest(messages=messages[:num_turns])) == expected


def test_a_new_turn_tokenises_only_itself(tokenizer: ChatTokenizer) -> None:
    history = [{"role": "user", "content": "first " * 200}, {"role": "assistant", "content": "answer"}]
    tokenizer.tokenize_chat(ChatCompletionRequest(messages=history[:2]))
    before = tokenizer.statistics()
    tokenizer.tokenize_chat(ChatCompletionRequest(messages=[*history, {"role": "user", "content": "second"}]))
    after = tokenizer.statistics()
    assert after.hits > before.hits
    assert after.num_tokens - before.num_tokens < 300


def test_the_cache_stays_within_its_tokens(model_dir: Path) -> None:
    loaded = ChatTokenizer.load(model_dir)
    small = ChatTokenizer(loaded._tokenizer, loaded._template, max_cached_tokens=100)
    for index in range(50):
        small.tokenize_chat(ChatCompletionRequest(messages=[{"role": "user", "content": f"question {index}"}]))
        assert small.statistics().num_tokens <= 100


def test_no_cut_before_a_token_that_another_may_swallow() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken("<x>", special=True, normalized=False),  # inside <<x>>
            AddedToken("<<x>>", special=True, normalized=False),  # overlaps its own start? no; nothing holds it
            AddedToken("<s>", special=True, normalized=False, lstrip=True),  # eats the space before it
            AddedToken("<n>", special=True, normalized=True),  # matched in normalised text
        ]
    )
    pattern = cut_pattern(tokenizer)
    assert pattern is not None
    assert split_segments("a<x>b<<x>>a <s>b<n>", pattern) == ["a<x>b", "<<x>>a <s>b<n>"]


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
