from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import openai
import pytest

from kvist.engine import bundled_model_path
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.config import EngineConfig
from kvist.engine.loading import load_engine
from kvist.engine.server.api import Api, ServedModel
from kvist.http import ClientDisconnectedError, Request, Responder
from kvist.openai.tokenization import ChatTokenizer
from kvist.router.config import RouterConfig
from kvist.router.doors.service import RouterService

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What does the function return, and which errors does it raise?"}]
PROMPT = "The function returns a new list. The method raises an exception when the argument is not a string. "


def events(body: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_is_answered_and_counted(post, served) -> None:
    body = post(CHAT, {"model": "tiny", "messages": QUESTION, "max_tokens": 8, "temperature": 0}).json()
    (choice,) = body["choices"]
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    served.wait_until_idle()


def test_a_repeated_prompt_reports_its_cached_tokens(post) -> None:
    request = {"prompt": PROMPT * 3, "max_tokens": 6, "temperature": 0}
    post("/flush_cache")
    first, second = (post(TEXT, request).json() for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (second["usage"]["prompt_tokens"] - 1) // 16 * 16 > 0
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert post("/flush_cache").status_code == 200
    assert post(TEXT, request).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    salted = post(TEXT, request | {"cache_salt": "other"}).json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "ask"), [(CHAT, {"messages": QUESTION}), (TEXT, {"prompt": PROMPT})], ids=["chat", "text"]
)
def test_a_stream_carries_the_same_answer_as_the_whole(path: str, ask: dict[str, Any], post) -> None:
    request = ask | {"max_tokens": 12, "n": 2, "seed": 3, "temperature": 0.7, "logprobs": True if path == CHAT else 1}
    whole = post(path, request).json()
    chunks = events(post(path, request | {"stream": True, "stream_options": {"include_usage": True}}).text)
    assert len({chunk["id"] for chunk in chunks}) == 1
    *parts, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == [choice["finish_reason"]]
        if path == CHAT:
            assert mine[0]["delta"]["role"] == "assistant"
            assert "".join(one["delta"].get("content") or "" for one in mine) == choice["message"]["content"]
            logprobs = [entry for one in mine if one["logprobs"] for entry in one["logprobs"]["content"]]
            for one, entry in zip(logprobs, choice["logprobs"]["content"], strict=True):  # steps may batch otherwise
                assert one == entry | {"logprob": pytest.approx(entry["logprob"], abs=1e-4)}
        else:
            assert "".join(one["text"] for one in mine) == choice["text"]
            offsets = [offset for one in mine if one["logprobs"] for offset in one["logprobs"]["text_offset"]]
            assert offsets == choice["logprobs"]["text_offset"]


def test_a_stream_without_include_usage_has_none(post) -> None:
    chunks = events(post(TEXT, {"prompt": "x", "max_tokens": 3, "stream": True, "ignore_eos": True}).text)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


def test_a_batch_of_prompts_times_n_choices_keeps_its_order(post) -> None:
    greedy = {"max_tokens": 5, "temperature": 0}
    prompts = [PROMPT, "The class"]
    body = post(TEXT, greedy | {"prompt": prompts, "n": 2}).json()
    alone = [post(TEXT, greedy | {"prompt": prompt}).json() for prompt in prompts]
    expected = [one["choices"][0]["text"] for one in alone for _ in range(2)]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)


def test_a_text_completion_without_a_limit_is_short(post) -> None:
    body = post(TEXT, {"prompt": "x", "ignore_eos": True}).json()
    assert body["usage"]["completion_tokens"] == 16


def test_options_that_ask_for_nothing_are_accepted(post) -> None:
    idle = {
        "echo": False,
        "suffix": None,
        "best_of": None,
        "n": 2,
        "logit_bias": {},
        "response_format": {"type": "text"},
    }
    assert post(TEXT, {"prompt": "x", "max_tokens": 1, **idle}).status_code == 200


def test_an_output_follows_what_it_is_asked_to(post) -> None:
    person = {"type": "object", "properties": {"age": {"enum": [7, 77]}, "name": {"type": "string", "maxLength": 5}}}
    person |= {"required": ["age", "name"], "additionalProperties": False}
    wanted: list[tuple[dict[str, Any], Callable[[str], object]]] = [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": person}}}, as_person),
        ({"guided_json": json.dumps(person)}, as_person),
        ({"structured_outputs": {"json": person}}, as_person),
        (
            {"structured_outputs": {"json": person, "disable_any_whitespace": True}},
            lambda text: as_person(text.strip()),
        ),
        ({"structured_outputs": {"regex": "[ab]{3}[0-9]{2}"}}, lambda text: re.fullmatch("[ab]{3}[0-9]{2}", text)),
        ({"structured_outputs": {"choice": ["yes", "no, never"]}}, lambda text: text in ("yes", "no, never")),
        ({"guided_grammar": 'root ::= "x" ("=" [0-9])? ";"'}, lambda text: re.fullmatch("x(=[0-9])?;", text)),
    ]
    for asked, is_right in wanted:
        body = post(CHAT, {"messages": QUESTION, **asked, "max_tokens": 60, "seed": 5}).json()
        text, reason = body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]
        if is_right is as_person and reason == "length":  # of white space between there may be any
            assert text.startswith("{")
        else:
            assert reason == "stop"
            assert is_right(text), (asked, text)
    same = {"prompt": PROMPT, "guided_regex": "[a-z]{8}", "n": 3, "seed": 5}
    texts = [choice["text"] for choice in post(TEXT, same).json()["choices"]]
    assert len(set(texts)) == 3
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts)
    any_object = {"prompt": PROMPT, "response_format": {"type": "json_object"}, "max_tokens": 2}
    assert post(TEXT, any_object).json()["choices"][0]["text"].startswith("{")


def as_person(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == {"age", "name"} and found["age"] in (7, 77) and len(found["name"]) <= 5


def test_bias_bans_and_allowed_tokens_decide(post) -> None:
    ask = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    plain = post(TEXT, ask).json()["choices"][0]
    first, text = plain["token_ids"][0], plain["text"]
    assert first not in post(TEXT, ask | {"logit_bias": {str(first): -100}}).json()["choices"][0]["token_ids"]
    assert post(TEXT, ask | {"logit_bias": {"77": 100}}).json()["choices"][0]["token_ids"] == [77] * 6
    assert set(post(TEXT, ask | {"allowed_token_ids": [77, 78]}).json()["choices"][0]["token_ids"]) <= {77, 78}
    words = [text.split()[0], " ".join(text.split()[1:3])]
    free = post(TEXT, ask | {"bad_words": words}).json()["choices"][0]["text"]
    assert not any(word in free for word in words)


def test_a_prompt_is_cut_to_what_is_wanted_of_it(post) -> None:
    ask = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    tokens = post("/tokenize", {"prompt": PROMPT}).json()["tokens"]

    def answer(**fields: Any) -> tuple[list[int], int]:
        body = post(TEXT, ask | fields).json()
        return body["choices"][0]["token_ids"], body["usage"]["prompt_tokens"]

    assert answer(prompt=PROMPT, truncate_prompt_tokens=5) == answer(prompt=tokens[-5:])
    right = answer(prompt=PROMPT, truncate_prompt_tokens=5, truncation_side="right")
    assert right == answer(prompt=tokens[:5])
    assert answer(prompt=PROMPT, truncate_prompt_tokens=500) == answer(prompt=PROMPT)
    too_long = {"prompt": tokens * 500, "max_tokens": 1, "swa_scratch": True}
    assert post(TEXT, too_long).json()["error"]["param"] == "prompt"
    assert post(TEXT, too_long | {"truncate_prompt_tokens": -1}).json()["error"]["param"] == "swa_scratch"


def test_tokens_are_told_as_they_are_asked_for(post) -> None:
    ask = {"messages": QUESTION, "max_tokens": 6, "logprobs": True, "ignore_eos": True, "request_id": "mine"}
    named = post(CHAT, ask | {"return_tokens_as_token_ids": True, "return_token_ids": True}).json()
    (choice,) = named["choices"]
    assert named["id"] == "chatcmpl-mine"
    assert [each["token"] for each in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
    text = post("/detokenize", {"tokens": choice["token_ids"], "model": "tiny"}).json()["prompt"]
    assert b"".join(bytes(each["bytes"]) for each in choice["logprobs"]["content"]) == text.encode()
    counted = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(post(CHAT, ask | {"stream": True, "stream_options": counted}).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len(counts) > 2
    end = post("/tokenize", {"prompt": "", "model": "tiny"}).json()["tokens"]
    special = {"prompt": [*end, 5], "logit_bias": {"0": 100}, "max_tokens": 2, "ignore_eos": True}
    assert post(TEXT, special).json()["choices"][0]["text"] == ""
    assert post(TEXT, special | {"skip_special_tokens": False}).json()["choices"][0]["text"] != ""


def test_a_prompts_own_log_probabilities_are_told(post) -> None:
    tokens = post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    ask = {"prompt": PROMPT, "temperature": 0, "logprobs": 2}
    post(TEXT, ask)  # what is cached has no logits, and is computed again
    alone = post(TEXT, ask | {"echo": True, "max_tokens": 0}).json()
    (choice,), usage = alone["choices"], alone["usage"]
    told = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(tokens), 0)
    assert "".join(told["tokens"]) == "<bos>" + PROMPT
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert len(told["token_logprobs"]) == len(told["text_offset"]) == len(tokens)
    best = [max(top.values()) for top in told["top_logprobs"][1:]]
    assert all(own <= most for own, most in zip(told["token_logprobs"][1:], best, strict=True))

    more = post(TEXT, ask | {"echo": True, "max_tokens": 3, "ignore_eos": True}).json()["choices"][0]
    plain = post(TEXT, ask | {"max_tokens": 3, "ignore_eos": True}).json()["choices"][0]
    assert more["text"] == PROMPT + plain["text"]
    assert more["logprobs"]["tokens"] == told["tokens"] + plain["logprobs"]["tokens"]
    assert more["logprobs"]["token_logprobs"][: len(tokens)] == pytest.approx(told["token_logprobs"], abs=1e-4)
    chunks = events(post(TEXT, ask | {"echo": True, "max_tokens": 3, "ignore_eos": True, "stream": True}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == more["text"]

    spelt = post(TEXT, ask | {"prompt_logprobs": 0, "max_tokens": 1}).json()["choices"][0]["prompt_logprobs"]
    assert [list(each) for each in spelt[1:]] == [[str(token_id)] for token_id in tokens[1:]]
    assert spelt[0] is None
    found = [each[str(token_id)]["logprob"] for each, token_id in zip(spelt[1:], tokens[1:], strict=True)]
    assert found == pytest.approx(told["token_logprobs"][1:], abs=1e-4)
    chat = post(CHAT, {"messages": QUESTION, "prompt_logprobs": 1, "max_tokens": 1}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert {1} <= {entry["rank"] for each in chat["prompt_logprobs"][1:] for entry in each.values()}


def test_what_lm_eval_asks_ranks_continuations(post) -> None:
    """lm_eval 0.4.13, `local-completions`: a batch of token ids, read by `LocalCompletionsAPI.parse_logprobs`."""
    context = post("/tokenize", {"prompt": PROMPT, "add_special_tokens": False}).json()["tokens"]
    ask = {"prompt": context, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    greedy = post(TEXT, ask).json()["choices"][0]["token_ids"]
    prompts = [context + greedy, context + greedy[::-1], [*context, *greedy[:2], 17]]
    sent = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    choices = post(TEXT, sent | {"echo": True}).json()["choices"]
    ranked = []
    for prompt, choice in zip(prompts, sorted(choices, key=lambda each: each["index"]), strict=True):
        own, top = (choice["logprobs"][name][len(context) : -1] for name in ("token_logprobs", "top_logprobs"))
        alone = post(TEXT, {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}).json()["choices"][0]
        expected = [entry["logprob"] for each in alone["prompt_logprobs"][len(context) :] for entry in each.values()]
        assert own == pytest.approx(expected, abs=1e-4)
        ranked.append((sum(own), all(one == max(best.values()) for one, best in zip(own, top, strict=True))))
    assert [is_greedy for _, is_greedy in ranked] == [True, False, False]
    assert max(ranked) == ranked[0]


def test_bytes_of_a_split_character_are_its_own() -> None:
    tokenizer = ChatTokenizer.load(bundled_model_path())
    tokens = tokenizer.tokenize_text("naïve 🌞 ﷽ text", add_special_tokens=False).tolist()
    assert any("\ufffd" in tokenizer.text([token_id]) for token_id in tokens)
    assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == tokenizer.text(tokens)


def test_a_model_is_told_by_name(served) -> None:
    assert httpx.get(f"{served.url}/v1/models/alias", timeout=60).json()["id"] == "alias"
    assert httpx.get(f"{served.url}/v1/models/a/b", timeout=60).json()["error"]["code"] == "model_not_found"


def test_token_ids_are_taken_as_they_are(post) -> None:
    body = post(TEXT, {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 2}).json()
    assert body["usage"]["prompt_tokens"] == 5


def test_seeded_choices_differ_from_each_other_and_repeat(post) -> None:
    request = {"prompt": PROMPT, "max_tokens": 16, "n": 3, "seed": 11, "temperature": 1.5, "ignore_eos": True}
    first, second = ([c["text"] for c in post(TEXT, request).json()["choices"]] for _ in range(2))
    assert first == second
    assert len(set(first)) == 3


def test_a_stop_string_is_cut_off(post) -> None:
    request = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    text = post(TEXT, request).json()["choices"][0]["text"]
    stop = text[8:11]
    choice = post(TEXT, request | {"stop": stop}).json()["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_the_openai_client_understands_it(served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["tiny", "alias"]
        answer = client.chat.completions.create(
            model="alias", messages=QUESTION, max_tokens=8, logprobs=True, top_logprobs=2, temperature=0
        )
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
        stream = client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=8, stream=True, temperature=0
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == answer.choices[0].message.content
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        (CHAT, {"messages": QUESTION, "model": "other"}, 404, "model: got 'other', expected one of"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {}, 400, "messages"),
        (CHAT, {"messages": QUESTION, "temperature": -1}, 400, "temperature"),
        (CHAT, {"messages": QUESTION, "max_tokens": 9000}, 400, "9000 to generate.*at most 8192"),
        (TEXT, {"prompt": "x", "top_p": 0}, 400, "top_p"),
        (TEXT, {"prompt": "x", "n": 0}, 400, "n"),
        (TEXT, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens: got 0"),
        (TEXT, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
        (CHAT, {"messages": QUESTION, "echo": True}, 400, "echo"),
        (TEXT, {"prompt": []}, 400, "prompt"),
        (TEXT, {"prompt": [1, "x"]}, 400, "prompt"),
        (TEXT, {"prompt": [99999]}, 400, "got 99999, expected token ids below"),
        (TEXT, {"prompt": "x", "max_tokens": 1, "min_tokens": 2}, 400, "min_tokens"),
        (TEXT, {"prompt": ["x"] * 41}, 400, "got 41, expected at most 40 seq"),
        (TEXT, {"prompt": [[5]] * 20_000, "n": 128}, 400, "got 2560000, expected at most 40"),
        (TEXT, {"prompt": "x", "suffix": "y"}, 400, "suffix: got 'y'"),
        (TEXT, {"prompt": "x", "best_of": 3}, 400, "best_of: got 3"),
        (TEXT, {"prompt": "x", "swa_scratch": True}, 400, "swa_scratch: got True, expected false"),
        (CHAT, {"messages": QUESTION, "swa_scratch": "yes"}, 400, "swa_scratch"),
        (CHAT, {"messages": QUESTION, "logit_bias": {"7": 101}}, 400, "logit_bias"),
        (
            CHAT,
            {"messages": QUESTION, "logit_bias": {"70000": 1}},
            400,
            "logit_bias: got 70000, expected token",
        ),
        (CHAT, {"messages": QUESTION, "allowed_token_ids": []}, 400, "allowed_token_ids"),
        (CHAT, {"messages": QUESTION, "add_special_tokens": True}, 400, "add_special_tokens"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "part 'image_url', expected text",
        ),
        (CHAT, {"messages": QUESTION, "response_format": {"type": "xml"}}, 400, "response_format: got type 'xml'"),
        (
            CHAT,
            {"messages": QUESTION, "response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            400,
            "response_format: got type 'structural_tag', expected text, json_object or json_schema",
        ),
        (
            TEXT,
            {"prompt": "x", "structured_outputs": {"structural_tag": {"format": {"type": "any_text"}}}},
            400,
            "structured_outputs.structural_tag: got",
        ),
        (TEXT, {"prompt": "x", "guided_regex": "(a"}, 400, "guided_regex: got .*unclosed group"),
        (
            TEXT,
            {"prompt": "x", "structured_outputs": {"json": {"type": "objekt"}}},
            400,
            "structured_outputs.json: got",
        ),
        (TEXT, {"prompt": "x", "structured_outputs": {"choice": "a"}}, 400, "choice: got 'a', expected a list"),
        (TEXT, {"prompt": "x", "guided_regex": "a", "guided_choice": ["a"]}, 400, "guided_choice: expected one"),
        (TEXT, {"prompt": "x", "bad_words": ["b", " "]}, 400, "bad_words: got ' ', expected more than spaces"),
        (TEXT, {"prompt": "x", "guided_regex": "a", "bad_words": ["b"]}, 400, "bad_words: .*beside guided_regex"),
    ],
)
def test_a_bad_request_is_refused_by_name(
    path: str, body: dict[str, Any], status: int, named: str, post, served
) -> None:
    response = post(path, body)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert re.search(named, error["message"])
    served.wait_until_idle()


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v2", 404), ("GET", CHAT, 405)])
def test_what_there_is_not_is_refused_in_the_same_shape(method: str, path: str, status: int, served) -> None:
    response = httpx.request(method, served.url + path, timeout=60)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_broken_json_is_refused(post) -> None:
    response = post(CHAT, content=b'{"messages": ')
    assert response.status_code == 400
    assert "not valid JSON" in response.json()["error"]["message"]


def test_a_body_over_the_limit_is_refused_declared_or_not(post) -> None:
    assert post(TEXT, {"prompt": "x" * 2**20}).status_code == 413
    pieces = (b"x" * 2**17 for _ in range(9))
    assert post(TEXT, content=pieces).status_code == 413


async def test_a_body_is_forgotten_before_its_answer_begins() -> None:
    """So what all of them take together is bounded as `HttpLimits` says."""
    forgotten: list[bool] = []

    class Body(bytes):
        def __del__(self) -> None:
            forgotten.append(True)

    class Connection:
        was_forgotten: bool | None = None

        def on_response_start(self) -> None:
            """It counts the body no more."""

        def send(self, _: bytes) -> None:
            self.was_forgotten = bool(forgotten)

        async def drained(self) -> None:
            raise ClientDisconnectedError("enough")

    def respond(connection: Connection) -> Coroutine[Any, Any, None]:
        body = Body(b'{"prompt": "x", "max_tokens": 5, "stream": true}')
        request = Request("POST", TEXT, [], body, None)
        return api.handle(request, Responder(connection, request, keep_alive=True))

    core, connection = load_engine(EngineConfig(model_dir=bundled_model_path())).core, Connection()
    async with AsyncEngine(core, max_num_open=1) as engine:
        tokenizer = ChatTokenizer.load(bundled_model_path())
        api = Api(engine, tokenizer, ServedModel(names=("tiny",), path="", kv_cache_dtype="float32"))
        with pytest.raises(ClientDisconnectedError):
            await respond(connection)
    assert connection.was_forgotten


def test_a_stream_whose_client_leaves_frees_its_blocks(served) -> None:
    request = {"prompt": PROMPT, "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", served.url + TEXT, json=request) as response:
        lines = response.iter_lines()
        next(lines)
        assert served.metric("requests_running") == 1
    served.wait_until_idle()


def test_a_client_that_leaves_before_its_answer_frees_its_blocks(served) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 8000, "ignore_eos": True}).encode()
    host, port = served.url.removeprefix("http://").split(":")
    before = served.metric("output_tokens")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        while served.metric("output_tokens") == before:
            time.sleep(0.005)
    served.wait_until_idle()


def test_the_server_says_what_it_is(served) -> None:
    info = httpx.get(f"{served.url}/server_info", timeout=60).json()
    version = info.pop("version")
    assert version
    assert info == {
        "engine": "kvist",
        "model": "tiny",
        "model_path": str(bundled_model_path()),
        "block_size": 16,
        "max_model_len": 8192,
        "max_total_num_tokens": 16 * max(pool.num_blocks for pool in served.core.kv_cache.pools),
        "kv_cache_dtype": "float32",
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "kv_events": {"endpoint": "tcp://127.0.0.1:5557"},
        "role": "both",
        "kv_transfer": None,
    }
    assert httpx.get(f"{served.url}/health", timeout=60).json() == {"status": "ok"}
    model = httpx.get(f"{served.url}/v1/models", timeout=60).json()["data"][0]
    assert model["max_model_len"] == 8192
    assert model["root"] == httpx.get(f"{served.url}/server_info", timeout=60).json()["model_path"]


def test_a_chat_and_a_text_are_tokenised_as_they_would_be_computed(post) -> None:
    chat = {"messages": [{"role": "user", "content": "hi – 🌞"}], "tools": [{"function": {"name": "f"}}]}
    for asked, path, counted in (
        (chat, "/v1/chat/completions", {}),
        (chat | {"chat_template_kwargs": {"add_generation_prompt": True}}, "/v1/chat/completions", {}),
        ({"prompt": "once upon a time"}, "/v1/completions", {}),
        ({"prompt": "once", "add_special_tokens": False}, "/v1/completions", {"add_special_tokens": False}),
    ):
        answer = post("/tokenize", asked | {"model": "tiny", "return_token_strs": True}).json()
        computed = post(path, {**asked, **counted, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == computed
        assert answer["max_model_len"] == 8192
        again = post("/v1/completions", {"prompt": answer["tokens"], "max_tokens": 1}).json()["usage"]
        assert again["prompt_tokens"] == computed
    assert post("/tokenize", {"prompt": "x"}).json()["token_strs"] is None


def test_what_cannot_be_tokenised_is_refused_by_name(post) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for asked, status, name in (
        ({}, 400, "prompt"),
        ({"prompt": [1, 2]}, 400, "prompt"),
        (chat | {"add_special_tokens": True}, 400, "add_special_tokens"),
        (chat | {"model": "other"}, 404, "model"),
        ({"messages": 5}, 400, "messages"),
    ):
        refusal = post("/tokenize", asked)
        assert refusal.status_code == status
        assert name in refusal.json()["error"]["message"]


async def test_a_router_finds_that_the_engine_renders_as_it_does(served) -> None:
    config = RouterConfig(
        worker_urls=(served.url,), port=0, model_path=str(bundled_model_path()), health_interval_s=0.05
    )
    page: dict[str, Any] = {}
    async with RouterService(config) as router, httpx.AsyncClient(base_url=router.url, timeout=60) as client:
        async with asyncio.timeout(60):
            while not page.get("rendering", {}).get("same"):
                page = (await client.get("/readiness")).json()
        assert page["rendering"] == {"same": 1, "differs": 0, "unknown": 0, "problems": []}
