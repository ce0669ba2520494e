"""Random mixes of real requests, as seeds have them: whole or streamed, left or waited for, among others in memory that
is too small for them all, each is answered as it is alone."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from lives import seeds
from lone_answers import Doubts

from kvist.engine import bundled_model_path
from kvist.engine import core as engine_core
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.config import EngineConfig
from kvist.engine.loading import load_engine
from kvist.engine.server.api import Api, ServedModel
from kvist.http import HttpServer
from kvist.openai.tokenization import ChatTokenizer

LIVES = seeds(2)
NUM_REQUESTS = 14
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SHARED = (
    "temperature",
    "seed",
    "top_k",
    "ignore_eos",
    "stop_token_ids",
    "logit_bias",
    "presence_penalty",
    "repetition_penalty",
    "stream",
)
WORDS = (
    "The function returns a new list of the open files in this directory, or None if the path does not exist. "
    "Grüße 👋 한글, and the method raises an exception when the argument is not a string. If it cannot be read, "
    "an OSError is raised. "
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["a"]}
HELD = [f"{end} and no more" for end in ("e", "n", "t", "s", " is", " a", " the", "d", "r", " of", "")]
STOPS = [*HELD, " the e", "e of", "\ufffd", "tion"]
TIGHT = {"max_num_seqs": 5, "max_num_batched_tokens": 45, "num_blocks": 17}
ROOMY = {"has_prefix_cache": False, "num_blocks": 32}


@dataclass
class Choice:
    """What an answer says of one choice, whether it came whole or in pieces."""

    text: str = ""
    ends: tuple[Any, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, part: dict[str, Any]) -> None:
        said = part.get("message") or part.get("delta") or part
        self.text += said.get("content") or said.get("text") or ""
        if part["finish_reason"] is not None:
            self.ends += (part["finish_reason"], part["stop_reason"])
        self.token_ids += part.get("token_ids", [])
        told = part["logprobs"] or {}
        self.tokens += [each["token"] for each in told.get("content", [])] + told.get("tokens", [])
        self.offsets += told.get("text_offset", [])
        self.logprobs += [each["logprob"] for each in told.get("content", [])]
        self.logprobs += [each or 0.0 for each in told.get("token_logprobs", [])]
        for each in part.get("prompt_logprobs") or []:
            self.logprobs += [entry["logprob"] for entry in (each or {}).values()]


def read(answer: httpx.Response) -> tuple[dict[int, Choice], tuple[int, int] | None]:
    """Return an answer's choices, and how many tokens it counts, if it does."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
        bodies = [json.loads(line) for line in lines if line != "[DONE]"]
    else:
        bodies = [answer.json()]
    if "choices" not in bodies[0]:
        return read_typed(bodies)
    choices: dict[int, Choice] = {}
    usage = None
    for body in bodies:
        assert "error" not in body, body
        for part in body["choices"]:
            choices.setdefault(part["index"], Choice()).add(part)
        if body["usage"] is not None:
            usage = (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
    return choices, usage


def read_typed(bodies: list[dict[str, Any]]) -> tuple[dict[int, Choice], tuple[int, int] | None]:
    """Return the same of an answer of Anthropic's messages or of OpenAI's responses: its last event is all of those."""
    whole = bodies[-1].get("response", bodies[0])
    if whole.get("object") == "response":
        texts = ["".join(part["text"] for part in item["content"]) for item in whole["output"]]
        kinds = [item["type"] for item in whole["output"]]
        ends, spent = (whole["status"], whole["incomplete_details"]), whole["usage"]
    else:
        blocks, spent = [*whole.get("content", [])], whole.get("usage")
        ends = (whole.get("stop_reason"), whole.get("stop_sequence"))
        for body in bodies[1:]:
            if body["type"] == "content_block_start":
                blocks.append(body["content_block"])
            elif body["type"] == "content_block_delta":
                blocks[body["index"]]["text"] += body["delta"]["text"]
            elif body["type"] == "message_delta":
                ends, spent = (body["delta"]["stop_reason"], body["delta"]["stop_sequence"]), body["usage"]
        texts, kinds = [block["text"] for block in blocks], [block["type"] for block in blocks]
    return {0: Choice("".join(texts), ends, tokens=kinds)}, (0, spent["output_tokens"])


class Client:
    """Makes the bodies of requests."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def ask(self) -> tuple[str, dict[str, Any]]:
        rng = self.random
        body: dict[str, Any] = {"max_tokens": rng.randint(1, 16), "temperature": 0, "return_token_ids": True}
        if rng.random() < 0.5:
            body |= {"temperature": rng.choice((0.6, 1.0)), "seed": rng.randrange(99), "top_k": 8}
            body["n"] = rng.choice((1, 1, 2))
        path, asked = (CHAT, self.chat()) if rng.random() < 0.4 else (TEXT, self.text())
        options: list[dict[str, Any]] = [
            {"stop": rng.sample(STOPS, 3)},
            {"stop": HELD},
            {"stop": "s", "include_stop_str_in_output": True, "min_tokens": 1},
            {"ignore_eos": True},
            {"stop_token_ids": [*range(0, 3072, 3)]},
            {"logit_bias": {str(rng.randrange(3, 3000)): 4.0, "4": -100}},
            {"presence_penalty": 1.0, "repetition_penalty": 1.2},
            rng.choice(
                (
                    {"structured_outputs": {"choice": ["Grüße", "Gruß 👋", "no"]}},
                    {"structured_outputs": {"regex": "[a-f]{2,5}( x)?"}},
                    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
                    {"bad_words": ["the", "a list"]},
                )
            ),
            {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": rng.randint(0, 2)},
            {"prompt_logprobs": 1},
        ]
        for option in rng.sample(options, rng.choice((0, 1, 1, 2, 3))):
            body |= option
        body |= asked
        if body["max_tokens"] == 0:
            body.pop("min_tokens", None)
        if "prompt_logprobs" not in body and rng.random() < 0.6:
            body |= {"stream": True, "stream_options": {"include_usage": rng.random() < 0.5}}
        if path == CHAT and rng.random() < 0.4:
            return self.typed(body)
        return path, body

    def typed(self, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return a chat as a request to one of the other APIs."""
        shared = {name: body[name] for name in SHARED if name in body}
        if self.random.random() < 0.5:
            return RESPONSES, shared | {"input": self.words(), "max_output_tokens": body["max_tokens"]}
        stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", [])
        asked = {"messages": body["messages"], "max_tokens": body["max_tokens"], "stop_sequences": stops}
        return MESSAGES, shared | asked

    def chat(self) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": self.words()}]}

    def text(self) -> dict[str, Any]:
        prompts = [self.words() for _ in range(self.random.choice((1, 1, 1, 2)))]
        asked: dict[str, Any] = {"prompt": prompts if len(prompts) > 1 else prompts[0]}
        if self.random.random() < 0.3:
            asked |= {"echo": True} | self.random.choice(({}, {"logprobs": 1}, {"max_tokens": 0}))
        return asked

    def words(self) -> str:
        text = WORDS * 2
        start = self.random.choice((0, 0, 0, 40))
        return text[start : start + self.random.randint(1, 380)]


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncEngine]]:
    path = bundled_model_path()
    core = load_engine(EngineConfig(model_dir=path, max_model_len=256, dtype="float32", **settings)).core
    model = ServedModel(
        names=("tiny",),
        path=str(path),
        kv_cache_dtype="float32",
    )
    async with AsyncEngine(core, max_num_open=200) as engine:
        limits = httpx.Limits(max_connections=None)
        async with (
            HttpServer(Api(engine, ChatTokenizer.load(path), model).handle) as server,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", limits=limits, timeout=None) as client,
        ):
            yield client, engine


async def one_by_one(
    alone: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> tuple[dict[int, Choice], tuple[int, int]]:
    """Return what a request is answered whole, if it asks for several choices then each by a request of its own."""
    num_choices, expected, num_prompt, num_output = body.get("n", 1), {}, 0, 0
    for number in range(num_choices):
        of_choice = {"n": 1, "seed": body["seed"] + number} if num_choices > 1 else {}
        answer = await alone.post(path, json=body | {"stream": False, "stream_options": None} | of_choice)
        choices, usage = read(answer)
        assert usage is not None
        num_prompt, num_output = usage[0], num_output + usage[1]
        for index, choice in choices.items():
            expected[index * num_choices + number] = choice
    return expected, (num_prompt, num_output)


def check_text(tokenizer: ChatTokenizer, body: dict[str, Any], choice: Choice) -> None:
    """Raise AssertionError unless a text is that of its tokens, up to what has stopped it."""
    if not choice.token_ids or body.get("echo"):
        return
    reason, stopped_by = choice.ends
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop", [])
    is_kept = body.get("include_stop_str_in_output", False)
    is_silent = isinstance(stopped_by, int) and not is_kept
    text = tokenizer.text(choice.token_ids[: len(choice.token_ids) - is_silent], skip_special_tokens=True)
    if isinstance(stopped_by, str):
        text = text[: text.index(stopped_by) + (len(stopped_by) if is_kept else 0)]
    assert (choice.text, reason in ("stop", "length")) == (text, True), body
    assert is_kept or not any(stop in choice.text for stop in stops), body


@pytest.mark.parametrize("seed", LIVES)
async def test_among_others_whole_or_in_pieces_each_request_is_answered_as_alone(seed: int, until) -> None:
    client, reached, tokenizer = Client(seed), Counter[str](), ChatTokenizer.load(bundled_model_path())
    asked = [client.ask() for _ in range(NUM_REQUESTS)]
    async with opened(**TIGHT) as (crowded, engine):
        tasks = []
        for path, body in asked:
            tasks.append(asyncio.create_task(crowded.post(path, json=body)))
            for _ in range(client.random.choice((0, 0, 30, 200))):
                await asyncio.sleep(0)
            if client.random.random() < 0.1:
                client.random.choice(tasks).cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: engine.statistics().kv_cache.num_used == 0)
        statistics = engine.statistics().scheduler
        assert (statistics.num_running, statistics.num_waiting) == (0, 0)
    async with opened(**ROOMY) as (alone, _):
        for (path, body), answer in zip(asked, answers, strict=True):
            if isinstance(answer, asyncio.CancelledError):
                continue
            assert isinstance(answer, httpx.Response), answer
            doubts = Doubts()
            with patch.object(engine_core, "draw", doubts.draw):
                expected, expected_usage = await one_by_one(alone, path, body)
            choices, usage = read(answer)
            if doubts.first_unsure:
                continue
            reached["compared"] += 1
            for index, choice in expected.items():
                got = choices[index]
                assert got.logprobs == pytest.approx(choice.logprobs, abs=1e-3), body
                got.logprobs = choice.logprobs
                assert got == choice, body
                check_text(tokenizer, body, got)
            assert usage in (expected_usage, None if "stream_options" in body else expected_usage), body
    assert reached["compared"] > NUM_REQUESTS // 2
