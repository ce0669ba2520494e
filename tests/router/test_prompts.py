"""Bodies become tokens as the worker will see them, or an estimate with the reason why not."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from kvist.engine import bundled_model_path
from kvist.openai.chat_template import ChatTemplate
from kvist.openai.chats import MESSAGES_PATH, RESPONSES_PATH
from kvist.openai.errors import RequestError
from kvist.openai.requests import ChatCompletionRequest
from kvist.openai.tokenization import ITEM_TOKENS, Beginnings, ChatTokenizer
from kvist.router import prompts
from kvist.router.prompts import (
    CHAT_PATH,
    COMPLETION_PATH,
    GENERATE_PATH,
    INLINE_FORM_BYTES,
    MAX_WAITING_PARSED,
    OneModel,
    ParsedRequest,
    PromptReader,
    Reading,
    _rest_of,
)

WORDS = ["<unk>", "user", "hello", "world", "again", ":", "end"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} end {% endfor %}"


@pytest.fixture
def reader() -> PromptReader:
    tokenizer = Tokenizer(models.WordLevel({word: idx for idx, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PromptReader(OneModel(ChatTokenizer(tokenizer, ChatTemplate(TEMPLATE, {}))))


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def words(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


async def test_a_chat_is_rendered_and_tokenised(reader: PromptReader) -> None:
    ask = await reader.read(CHAT_PATH, body(messages=[{"role": "user", "content": "hello world"}], cache_salt="s"))
    assert ask.token_ids.tolist() == words("user : hello world end")
    assert (ask.num_tokens, ask.model, ask.cache_salt, ask.untokenized_reason) == (5, "m", "s", None)


def chat_of(*texts: str) -> bytes:
    return body(messages=[{"role": "user", "content": text} for text in texts])


def is_read_now(reader: PromptReader, path: str, asked: bytes) -> bool:
    return isinstance(reader.read_now(path, asked), ParsedRequest)


async def test_what_takes_long_to_read_is_left_for_a_thread(reader: PromptReader) -> None:
    by_ids = PromptReader(OneModel(None), lambda: True)
    with_fastokens = PromptReader(OneModel(ChatTokenizer.load(bundled_model_path())))
    many = chat_of(*["x" * 10] * 900)
    for each, path, longest, longer in [
        (reader, CHAT_PATH, chat_of("hello " * 330), chat_of("hello " * 350)),
        (with_fastokens, CHAT_PATH, chat_of("hello " * 4000), chat_of("hello " * 4100)),
        (with_fastokens, COMPLETION_PATH, body(prompt="x" * 24_000), body(prompt="x" * 25_000)),
        (with_fastokens, CHAT_PATH, chat_of(*["x"] * 500), many),
        (PromptReader(OneModel(None)), CHAT_PATH, chat_of("x" * 200_000), chat_of("x" * 262_144)),
        (by_ids, COMPLETION_PATH, body(prompt=[7] * 600_000), body(prompt=[7] * 1_050_000)),
        (by_ids, GENERATE_PATH, body(input_ids=[7] * 600_000), body(input_ids=[7] * 1_050_000)),
    ]:
        now = each.read_now(path, longest)
        assert isinstance(now, ParsedRequest)
        assert now.num_tokens == (await each.read(path, longest)).num_tokens
        assert not is_read_now(each, path, longer)
        assert (await each.read(path, longer)).num_tokens > now.num_tokens
    with pytest.raises(RequestError, match="nested too deep"):
        await with_fastokens.read(CHAT_PATH, b'{"messages": ' + b"[" * 1000 + b" " * 30_000 + b"]" * 1000 + b"}")


async def test_of_a_conversation_only_what_is_new_is_tokenised_on_the_event_loop(reader: PromptReader) -> None:
    with_tokenizers = reader
    with_fastokens = ChatTokenizer.load(bundled_model_path())
    reader = PromptReader(OneModel(with_fastokens))
    turns = [f"turn {number} " * 1000 for number in range(9)]
    first, more = chat_of(*turns), chat_of(*turns, "and so on " * 1200)
    assert not is_read_now(reader, CHAT_PATH, first)
    assert not is_read_now(reader, CHAT_PATH, first)  # what has only begun to be read is not known
    expected = await reader.read(CHAT_PATH, first)
    now = reader.read_now(CHAT_PATH, first)
    assert isinstance(now, ParsedRequest)
    assert now.token_ids.tolist() == expected.token_ids.tolist()
    assert is_read_now(reader, CHAT_PATH, more)
    changed = [*turns[:-5], turns[-5] + "!", *turns[-4:]]
    assert not is_read_now(reader, CHAT_PATH, chat_of(*changed))  # the five last are new
    assert not is_read_now(reader, CHAT_PATH, chat_of("?", *turns))

    one = "one long message " * 3000
    await reader.read(CHAT_PATH, chat_of(one))
    assert not is_read_now(reader, CHAT_PATH, chat_of(one + "that grows"))  # so all of it is tokenised anew
    await with_tokenizers.read(CHAT_PATH, first)
    assert not is_read_now(with_tokenizers, CHAT_PATH, first)


async def test_a_short_request_that_continues_a_long_response_is_left_for_a_thread() -> None:
    reader = PromptReader(OneModel(ChatTokenizer.load(bundled_model_path())))
    for response_id, text in (("resp_1", "a short one"), ("resp_2", "a long one " * 3000)):
        messages_json = json.dumps([{"role": "user", "content": text}]).encode()
        reader.conversations.store(response_id, "http://a:1", messages_json)
    assert is_read_now(reader, RESPONSES_PATH, body(input="on", previous_response_id="resp_1"))
    assert not is_read_now(reader, RESPONSES_PATH, body(input="on", previous_response_id="resp_2"))


async def test_while_many_prompts_wait_for_threads_no_more_are_parsed_before(monkeypatch) -> None:
    reader = PromptReader(OneModel(ChatTokenizer.load(bundled_model_path())))
    may_go_on, asked = threading.Event(), chat_of("long " * 6000)
    monkeypatch.setattr(prompts, "_rest_of", lambda reading: may_go_on.wait() and _rest_of(reading))
    readings = [asyncio.create_task(reader.read(CHAT_PATH, asked)) for _ in range(MAX_WAITING_PARSED)]
    await asyncio.sleep(0)
    is_parsed = [is_parsed_in(reader.read_now(CHAT_PATH, asked))]
    may_go_on.set()
    assert len({(await each).num_tokens for each in readings}) == 1
    assert [*is_parsed, is_parsed_in(reader.read_now(CHAT_PATH, asked))] == [False, True]


def is_parsed_in(reading: ParsedRequest | Reading) -> bool:
    assert inspect.isgenerator(reading)
    return "fields" in inspect.getgeneratorlocals(reading)


async def test_only_beginnings_seen_lately_are_known() -> None:
    texts = [f"{number:7} " * 512 for number in range(4110)]
    beginnings = Beginnings()
    for number, text in enumerate(texts):
        beginnings.add(text)
        beginnings.add(texts[0])
        assert beginnings.num_known(texts[0] + "more") == beginnings.num_known(text) == 4096, number
    assert [beginnings.num_known(text) for text in texts[1:17]] == [0] * 14 + [4096] * 2
    assert beginnings.num_known(texts[0][:-1]) == beginnings.num_known("x" + texts[0]) == 0


async def test_text_whose_tokens_nobody_needs_is_not_rendered() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    needs_tokens = False
    template = ChatTemplate("{{ raise_exception('rendered') }}", {})
    reader = PromptReader(OneModel(ChatTokenizer(tokenizer, template)), needs_tokens=lambda: needs_tokens)
    chat = body(messages=[{"role": "user", "content": "hello " * 100}], stream=True)
    ask = await reader.read(CHAT_PATH, chat)
    assert (ask.model, ask.num_tokens, ask.obstacle) == ("m", len(chat) // 4, "not_needed")
    assert ask.fields["stream"] is True
    text = await reader.read(COMPLETION_PATH, body(prompt="hello " * 100))
    assert (text.token_ids, text.num_tokens, text.obstacle) == (None, 151, "not_needed")
    assert (await reader.read(COMPLETION_PATH, body(prompt=[1, 2, 3]))).num_tokens == 3
    with pytest.raises(RequestError, match="kv_transfer_params"):
        await reader.read(CHAT_PATH, body(messages=[{"role": "user", "content": "x"}], kv_transfer_params={}))
    without_tokenizer = PromptReader(OneModel(None), needs_tokens=lambda: False)
    assert (await without_tokenizer.read(CHAT_PATH, chat)).obstacle == "no_tokenizer"
    needs_tokens = True
    assert (await reader.read(CHAT_PATH, chat)).obstacle == "template_refused"


async def test_half_of_a_surrogate_pair_in_the_arguments_of_a_call_costs_the_match_and_not_the_request() -> None:
    tokenizer = ChatTokenizer.load(bundled_model_path())
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    reader = PromptReader(OneModel(ChatTokenizer(tokenizer._tokenizer, ChatTemplate(source, {}))))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"text": "\\ud800"}'}}
    ask = await reader.read(CHAT_PATH, body(messages=[{"role": "assistant", "tool_calls": [call]}]))
    assert (ask.token_ids, ask.obstacle) == (None, "not_unicode")


@pytest.mark.parametrize(
    ("prompt", "token_ids"), [("hello world", [2, 3]), ([5, 6, 7], [5, 6, 7]), (["hello"], [2]), ([[9, 8]], [9, 8])]
)
async def test_a_completion_takes_text_or_tokens(reader: PromptReader, prompt: Any, token_ids: list[int]) -> None:
    ask = await reader.read(COMPLETION_PATH, body(prompt=prompt))
    assert (ask.token_ids.tolist(), ask.num_tokens) == (token_ids, len(token_ids))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [5, 6, 7], "cache_salt": "s", "stream": True},
        {"prompt": [2**32 - 1] * 5000},
        {"prompt": [[5, 6], [7]]},
        {"prompt": [[1], [5, 6, 7], [2, 3, 4]] * 2000},
        {"prompt": [[5, 6], []]},
        {"prompt": "hello world"},
        {"prompt": ["hello"]},
        {"prompt": [5, 6, 7], "truncate_prompt_tokens": 2},
    ],
)
async def test_beside_an_index_prompts_read_the_same(fields: dict[str, Any]) -> None:
    plain, indexed = [
        await PromptReader(OneModel(None), lambda has_index=has_index: has_index).read(COMPLETION_PATH, body(**fields))
        for has_index in (False, True)
    ]
    for name in ("model", "num_tokens", "num_prompts", "obstacle", "cache_salt", "untokenized_reason"):
        assert getattr(indexed, name) == getattr(plain, name)
    assert (indexed.token_ids is None) == (plain.token_ids is None)
    assert plain.token_ids is None or indexed.token_ids.tolist() == plain.token_ids.tolist()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": []},
        {"prompt": [2**32]},
        {"prompt": [[1], [2**32]]},
        {"prompt": [[1], 2]},
        {"prompt": [1], "stream": 5},
        {"prompt": [1.5]},
    ],
)
async def test_a_prompt_of_another_form_is_left_to_the_worker(fields: dict[str, Any]) -> None:
    reasons = set()
    for has_index in (False, True):
        reader = PromptReader(OneModel(None), lambda has_index=has_index: has_index)
        ask = await reader.read(COMPLETION_PATH, body(**fields))
        assert (ask.outcome, ask.obstacle, ask.model) == ("load only", "not_understood", "m")
        reasons.add(ask.untokenized_reason)
    assert len(reasons) == 1


IDS = [7 * idx for idx in range(300_000)]
BATCH = [IDS[start : start + 1000] for start in range(0, len(IDS), 1000)]


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETION_PATH, {"prompt": IDS}),
        (COMPLETION_PATH, {"prompt": BATCH}),
        (GENERATE_PATH, {"input_ids": BATCH}),
        ("/v1/embeddings", {"input": IDS}),
        ("/v1/embeddings", {"input": BATCH}),
    ],
)
async def test_token_ids_become_no_objects_whether_or_not_the_policy_looks_at_them(
    monkeypatch: pytest.MonkeyPatch, has_index: bool, path: str, fields: dict[str, Any]
) -> None:
    parsed = list[int]()
    read_fields = prompts.read_fields
    monkeypatch.setattr(prompts, "read_fields", lambda text: (parsed.append(len(text)), read_fields(text))[1])
    ask = await PromptReader(OneModel(None), lambda: has_index, lambda: has_index).read(path, body(**fields))
    assert parsed
    assert max(parsed) < 100
    assert (ask.model, ask.path) == ("m", path)
    assert len(IDS) * 0.8 < ask.num_tokens < len(IDS) * 3
    assert ask.num_prompts == (len(BATCH) if BATCH in fields.values() and "input" not in fields else 1)
    assert (ask.token_ids is not None) == (has_index and "input" not in fields)
    assert ask.obstacle == (
        "other_endpoint"
        if "input" in fields
        else "not_needed"
        if not has_index
        else None
        if fields.get("prompt") is IDS
        else "batch"
    )


async def test_a_text_beside_many_token_ids_is_counted_as_a_text() -> None:
    reader = PromptReader(OneModel(None), lambda: False, lambda: False)
    ask = await reader.read(COMPLETION_PATH, body(prompt="hello world", allowed_token_ids=IDS))
    assert ask.num_tokens < 10


@pytest.mark.parametrize(
    "text",
    [
        b'{"input": [%b], "input": 7}' % (b"1," * 20_000 + b"1"),
        b'{"input": [%b], "model": "a", "model": "b", "\\u003a": 1}' % (b"1," * 20_000 + b"1"),
        b'{"input": [%b], "model": "a", "model": "b", "\\u003A": 1}' % (b"1," * 20_000 + b"1"),
        b'{"input": [%b]}' % (b"01," * 20_000 + b"1"),
        b'{"input": [%b]' % (b"1," * 20_000 + b"1"),
        b'{"input": [%b]}' % (b"[" * 200 + b"1," * 20_000 + b"1" + b"]" * 200),
        b'{"input": %b}' % (b"[" * 200_000),
        b'{"input": [%b], "kv_transfer_params": {}}' % (b"1," * 20_000 + b"1"),
    ],
)
async def test_a_body_of_token_ids_that_may_not_pass_is_refused_as_it_is_without_many(text: bytes) -> None:
    for needs_tokens in (True, False):
        with pytest.raises(RequestError):
            await PromptReader(OneModel(None), lambda: False, lambda needs=needs_tokens: needs).read(
                "/v1/embeddings", text
            )


async def test_an_alias_of_several_models_is_split_also_by_prompts_of_token_ids() -> None:
    class Aliases(OneModel):
        def resolve_alias(self, fields: dict[str, Any]) -> str:
            return repr(fields.get("prompt"))

    for has_index in (True, False):
        reader = PromptReader(Aliases(None), lambda has=has_index: has, lambda has=has_index: has)
        targets = [(await reader.read(COMPLETION_PATH, body(prompt=[idx] * 30_000))).model for idx in (1, 2, 1)]
        assert targets[0] == targets[2] != targets[1]


async def test_a_model_is_named_by_text_and_none_by_an_empty_one(reader: PromptReader) -> None:
    assert (await reader.read(COMPLETION_PATH, body(model="", prompt=[1]))).model is None
    with pytest.raises(RequestError, match="model: got 7, expected a string"):
        await reader.read("/v1/embeddings", body(model=7))


@pytest.mark.parametrize(
    ("fields", "token_ids"),
    [
        ({"text": "hello world"}, [2, 3]),
        ({"input_ids": [5, 6, 7], "text": None}, [5, 6, 7]),
        ({"input_ids": [5, 6, 7], "text": "hello world"}, [2, 3]),
        ({"text": ["hello", "hello world"]}, [2, 3]),
        ({"input_ids": [[1], [5, 6]]}, [5, 6]),
    ],
)
async def test_sglangs_own_endpoint_takes_text_or_tokens(
    reader: PromptReader, fields: dict[str, Any], token_ids: list[int]
) -> None:
    for each in (reader, PromptReader(reader._models, lambda: True)):
        ask = await each.read(GENERATE_PATH, body(**fields))
        assert (ask.token_ids.tolist(), ask.model, ask.path) == (token_ids, "m", GENERATE_PATH)
        assert ask.obstacle == (None if ask.num_prompts == 1 else "batch")


def form(*parts: tuple[str, bytes]) -> bytes:
    named = [b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (n.encode(), v) for n, v in parts]
    return b"".join(named) + b"--b--\r\n"


async def test_a_form_gives_its_model_and_a_long_one_is_left_for_a_thread(reader: PromptReader) -> None:
    path, model = "/v1/audio/transcriptions", ("model", "org/m:é".encode())
    ask = reader.read_now(path, form(("file", b"\x00\r\n--b\xff" * 640), model))
    assert ask is not None
    assert (ask.model, ask.obstacle, 10 < ask.num_tokens < 20) == ("org/m:é", "other_endpoint", True)
    assert (await reader.read(path, form(("file", b"x")))).model is None
    # As it is read in slices, one of which ends within the name of the field.
    for num_bytes in range(2**20 - 90, 2**20):
        is_now = is_read_now(reader, path, long := form(("file", b"x" * num_bytes), model))
        assert is_now == (len(long) <= INLINE_FORM_BYTES)
        assert (await reader.read(path, long)).model == "org/m:é"
    assert len(long) > INLINE_FORM_BYTES


@pytest.mark.parametrize(
    "parts", [[("model", b"m"), ("model", b"n")], [("model", b"")], [("model", b"a\r\nb")], [("model", b"x" * 257)]]
)
async def test_a_form_names_one_model_in_one_line(reader: PromptReader, parts: list[tuple[str, bytes]]) -> None:
    with pytest.raises(RequestError) as refusal:
        await reader.read("/v1/audio/transcriptions", form(*parts))
    assert (refusal.value.status, refusal.value.param) == (400, "model")


async def test_a_form_of_many_parts_is_refused_before_they_are_read(reader: PromptReader) -> None:
    with pytest.raises(RequestError, match="256 parts at most"):
        await reader.read("/v1/audio/transcriptions", form(*[("a", b"")] * 257))


async def test_a_batch_is_matched_by_its_longest_prompt_and_weighs_all_of_them(reader: PromptReader) -> None:
    ask = await reader.read(COMPLETION_PATH, body(prompt=[[1, 2], [3, 4, 5], [6]]))
    assert (ask.token_ids.tolist(), ask.num_tokens) == ([3, 4, 5], 6)


async def test_text_without_a_tokeniser_is_estimated_and_token_ids_still_match() -> None:
    reader = PromptReader(OneModel(None))
    ask = await reader.read(COMPLETION_PATH, body(prompt="x" * 400))
    assert (ask.token_ids, ask.num_tokens) == (None, 101)
    assert "no tokeniser of the model" in (ask.untokenized_reason or "")
    assert (await reader.read(COMPLETION_PATH, body(prompt=[1, 2]))).token_ids.tolist() == [1, 2]
    assert (await reader.read(CHAT_PATH, body(messages=[{"role": "user", "content": "x"}]))).token_ids is None


async def test_a_template_that_refuses_costs_the_match_and_not_the_request() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    reader = PromptReader(OneModel(ChatTokenizer(tokenizer, template)))
    ask = await reader.read(CHAT_PATH, body(messages=[{"role": "user", "content": "x"}]))
    assert ask.token_ids is None
    assert "roles must alternate" in (ask.untokenized_reason or "")


async def test_arguments_that_would_break_the_template_are_refused_by_name(reader: PromptReader) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(RequestError, match=r"^arguments: nested too deep, expected at most 128 levels") as refusal:
        await reader.read(CHAT_PATH, body(messages=messages))
    assert refusal.value.status == 400


async def test_a_template_of_plain_text_is_matched_up_to_the_message_with_the_first_image(reader: PromptReader) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    parts = [{"type": "text", "text": "hello"}, image, {"type": "text", "text": "world"}]
    messages = [
        {"role": "user", "content": "again"},
        {"role": "user", "content": parts},
        {"role": "user", "content": "again"},
    ]
    ask = await reader.read(CHAT_PATH, body(messages=messages))
    assert ask.token_ids[: ask.num_exact_tokens].tolist() == words("user : again end user :")
    rest = ask.token_ids[ask.num_exact_tokens :].tolist()
    assert rest[ITEM_TOKENS:] == words("hello world end user : again end")
    only_image = await reader.read(CHAT_PATH, body(messages=[{"role": "user", "content": [image]}]))
    assert only_image.token_ids[: only_image.num_exact_tokens].tolist() == words("user :")


def image_of(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("is_result", [False, True])
async def test_images_of_messages_are_told_apart(reader: PromptReader, engine: str, is_result: bool) -> None:
    reader = PromptReader(OneModel(reader._models.tokenizer("m"), engine))

    async def tokens_of(data: str, **fields: Any) -> list[int]:
        source = {"type": "base64", "media_type": "image/png", "data": data}
        block: dict[str, Any] = {"type": "image", "source": source, **fields}
        if is_result:
            block = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
        asked = await reader.read(MESSAGES_PATH, body(messages=[{"role": "user", "content": [block]}]))
        assert (asked.outcome, asked.num_tokens > ITEM_TOKENS) == ("partly", True)
        return asked.token_ids.tolist()

    assert await tokens_of("YQ==", cache_control={"type": "ephemeral"}) == await tokens_of("YQ==")
    assert await tokens_of("YQ==") != await tokens_of("Yg==")


PARTS = "{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }} {% endfor %}"


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("{{ m['content'] }}", PARTS)])
def test_what_stands_for_a_chat_with_images_begins_its_next_turn_and_no_other_chat(
    reader: PromptReader, template: str
) -> None:
    tokenizer = ChatTokenizer(reader._models.tokenizer("m")._tokenizer, ChatTemplate(template, {}))

    def tokens_of(*urls: str, more: str = "") -> list[int]:
        parts = [part for url in urls for part in ({"type": "text", "text": "hello"}, image_of(url))]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "x"}]}]
        messages += [{"role": "assistant", "content": more}, {"role": "user", "content": "again"}] if more else []
        chat = ChatCompletionRequest(messages=messages)
        token_ids, num_exact = tokenizer.tokenize_with_items(chat, tokenizer.template)
        assert token_ids[:num_exact].tolist() == tokenizer.tokenize_chat(chat).tolist()
        assert len(token_ids) > ITEM_TOKENS * len(urls)
        return token_ids.tolist()

    first = tokens_of("data:a", "data:b")
    assert tokens_of("data:a", "data:b") == first
    assert tokens_of("data:a", "data:b", more="world")[: len(first)] == first
    others = [tokens_of("data:b", "data:a"), tokens_of("data:a", "data:c"), tokens_of("data:c", "data:b")]
    assert all(other[: len(first)] != first for other in others)
    assert others[1][:ITEM_TOKENS] == first[:ITEM_TOKENS] != others[0][:ITEM_TOKENS]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}", "U:hello"),
        (
            "{% for p in m.content if p.type == 'image' %}<image>{% endfor %}"
            "{% for p in m.content %}{{ p.text }}{% endfor %}",
            "U:",
        ),
        ("{% for p in m.content %}{{ p.text | trim if p.type == 'text' }}{% endfor %}", "U:hello"),
    ],
)
def test_only_what_comes_before_the_first_image_is_rendered(content: str, text: str) -> None:
    template = ChatTemplate("{% for m in messages %}U:" + content + "{% endfor %}end", {})
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    parts = [{"type": "text", "text": "hello"}, image, {"type": "text", "text": "world"}, image]
    assert template.render(ChatCompletionRequest(messages=[{"role": "user", "content": parts}])) == text


def test_a_body_full_of_images_is_read_up_to_the_64th(reader: PromptReader) -> None:
    chat = ChatCompletionRequest(messages=[{"role": "user", "content": [image_of("data:"), None, 5, "again"] * 5000}])
    token_ids, num_exact = reader._models.tokenizer("m").tokenize_with_items(
        chat, reader._models.tokenizer("m").template
    )
    assert num_exact < len(token_ids) <= 64 * (ITEM_TOKENS + 20_000)


async def test_other_endpoints_give_their_model_if_they_say_one(reader: PromptReader) -> None:
    assert (await reader.read("/v1/embeddings", body(input="x"))).model == "m"
    for odd in (b"", b"\xff", b"[1]", b'{"model": 3}', b"--boundary"):
        ask = await reader.read("/v1/audio/transcriptions", odd)
        assert (ask.model, ask.token_ids) == (None, None)


async def test_a_body_to_be_explained_may_be_of_any_kind(reader: PromptReader) -> None:
    assert (await reader.read(None, b'{"token_ids": [1, 2, 3]}')).token_ids.tolist() == [1, 2, 3]
    assert (await reader.read(None, body(prompt="hello"))).token_ids.tolist() == [2]
    assert (await reader.read(None, body(messages=[{"role": "user", "content": "hello"}]))).num_tokens == 4
    assert (await reader.read(None, b"{}")).obstacle == "not_understood"
    for wrong in (b"{", b'{"token_ids": "x"}', b'{"token_ids": [-1]}'):
        with pytest.raises(RequestError) as refusal:
            await reader.read(None, wrong)
        assert refusal.value.status == 400


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
TURN = {"role": "user", "content": "hello"}


@pytest.mark.parametrize("path", [CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH])
async def test_a_chat_is_the_same_prompt_by_every_api(reader: PromptReader, path: str) -> None:
    name = "input" if path == RESPONSES_PATH else "messages"
    ask = await reader.read(path, body(**{name: [TURN, {"role": "assistant", "content": "world"}], "cache_salt": "s"}))
    assert ask.token_ids.tolist() == [*words("user : hello end"), 0, *words(": world end")]
    assert (ask.model, ask.cache_salt, ask.outcome, ask.obstacle) == ("m", "s", "tokens", None)


@pytest.mark.parametrize(
    ("path", "fields", "outcome", "obstacle"),
    [
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]},
            "partly",
            "image",
        ),
        (
            MESSAGES_PATH,
            {"messages": [TURN, {"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]},
            "partly",
            "image",
        ),
        (RESPONSES_PATH, {"input": [TURN, {"role": "user", "content": [{"type": "input_image"}]}]}, "partly", "image"),
        (COMPLETION_PATH, {"prompt": ["hello", "world"]}, "partly", "batch"),
        (COMPLETION_PATH, {"prompt": [1, 2]}, "tokens", None),
        (MESSAGES_PATH, {"messages": 5}, "load only", "not_understood"),
        (RESPONSES_PATH, {"input": [{"type": "image_generation_call"}]}, "load only", "unknown_part"),
        ("/v1/embeddings", {"input": "x"}, "load only", "other_endpoint"),
        (GENERATE_PATH, {"text": "hello", "lora_path": "a"}, "load only", "rewritten"),
        (GENERATE_PATH, {"text": "hello", "image_data": "a"}, "load only", "rewritten"),
        (GENERATE_PATH, {"input_embeds": [[0.5]]}, "load only", "not_understood"),
        (GENERATE_PATH, {"input_ids": [-1]}, "load only", "not_understood"),
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ x }}"},
            "load only",
            "rewritten",
        ),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "x"}], "chat_template": None}, "tokens", None),
        (COMPLETION_PATH, {"prompt": [1, 2], "truncate_prompt_tokens": 1}, "load only", "rewritten"),
        (COMPLETION_PATH, {"prompt": "hello", "suffix": "x"}, "load only", "rewritten"),
        (COMPLETION_PATH, {"prompt": "hello", "truncate_prompt_tokens": -1}, "tokens", None),
        (COMPLETION_PATH, {"prompt_embeds": "AAAA"}, "load only", "not_understood"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "x"}], "stream": 1}, "load only", "not_understood"),
        (RESPONSES_PATH, {"input": "hello", "truncation": "auto"}, "tokens", None),
    ],
)
async def test_how_well_a_prompt_is_read_is_said(
    reader: PromptReader, path: str, fields: dict[str, Any], outcome: str, obstacle: str | None
) -> None:
    ask = await reader.read(path, body(**fields))
    assert (ask.outcome, ask.obstacle, ask.model) == (outcome, obstacle, "m")


async def test_on_vllm_the_tokeniser_adds_its_special_tokens_to_the_prompts_of_responses() -> None:
    tokenizer, asked = ChatTokenizer.load(bundled_model_path()), body(messages=[TURN], input=TURN["content"])
    chat, of_others, of_vllm = [
        (await PromptReader(OneModel(tokenizer, engine)).read(path, asked)).token_ids.tolist()
        for path, engine in ((CHAT_PATH, "vllm"), (RESPONSES_PATH, None), (RESPONSES_PATH, "vllm"))
    ]
    assert of_others == chat
    assert of_vllm == [chat[0], *chat]


@pytest.mark.parametrize("path", [CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH])
async def test_without_a_tokeniser_or_a_template_that_is_the_obstacle(path: str) -> None:
    asked = body(messages=[TURN], input="hello")
    assert (await PromptReader(OneModel(None)).read(path, asked)).obstacle == "no_tokenizer"
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    plain = OneModel(ChatTokenizer(tokenizer, None))
    assert (await PromptReader(plain).read(path, asked)).obstacle == "no_chat_template"
    refusing = OneModel(ChatTokenizer(tokenizer, ChatTemplate("{{ raise_exception('no') }}", {})))
    assert (await PromptReader(refusing).read(path, asked)).obstacle == "template_refused"
