"""A response that goes on with another is for the worker that made that, and its prompt is all that was said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvist.engine import bundled_model_path
from kvist.openai.requests import ChatCompletionRequest
from kvist.openai.tokenization import ChatTokenizer
from kvist.router import conversations
from kvist.router.conversations import Conversations

MODEL = str(bundled_model_path())
SAID = "a colon stands in it: data: x\n\n" + "and it is longer than the end of a stream that is kept of others " * 200


def response_of(response_id: str, text: str = SAID, **fields: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    output = [
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content},
    ]
    return {"id": response_id, "object": "response", "status": "completed", "output": output, "model": "m"} | fields


@pytest.fixture
def responding(http_bytes: Any) -> Callable[[str], Any]:
    """Make the answers of a worker that numbers its responses, behind its name."""

    def make(name: str) -> Any:
        count = 0

        async def answer(received: Any, writer: asyncio.StreamWriter) -> None:
            nonlocal count
            count += received.method == "POST"
            told = response_of(f"resp_{name}{count}")
            if b'"stream": true' not in received.body and b'"stream":true' not in received.body:
                writer.write(http_bytes.response(json.dumps(told).encode()))
                return
            events = [{"type": "response.created", "response": told | {"output": []}}]
            events.append({"type": "response.completed", "response": told})
            text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
            writer.write(http_bytes.event_stream_head + http_bytes.chunk(text.encode()) + b"0\r\n\r\n")

        return answer

    return make


async def ask(front: Any, **fields: Any) -> tuple[str, str]:
    """Return whose the answer is, and its id."""
    answer = await front.client.post("/v1/responses", json={"model": "m"} | fields)
    assert answer.status_code == 200
    if not fields.get("stream"):
        return answer.headers["x-kvist-worker"], answer.json()["id"]
    last = json.loads(answer.text.split("\ndata: ")[-1])
    return answer.headers["x-kvist-worker"], last["response"]["id"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_conversation_stays_with_its_worker_and_has_the_tokens_of_all_of_it(
    worker, router, responding, is_stream: bool
) -> None:
    tokenizer = ChatTokenizer.load(bundled_model_path())
    async with (
        worker(answer=responding("a")) as one,
        worker(answer=responding("b")) as two,
        router(one.url, two.url, policy="kv", model_path=MODEL) as front,
    ):
        reader = front.service._forwarder.reader
        owner, first_id = await ask(front, input="hello", instructions="Be terse.", stream=is_stream)
        said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": SAID}]
        last_id = first_id
        for turn in range(3):
            question = f"and {turn}?"
            body = {"model": "m", "input": question, "previous_response_id": last_id}
            said.append({"role": "user", "content": question})
            read = await reader.read("/v1/responses", json.dumps(body).encode())
            assert read.token_ids.tolist() == tokenizer.tokenize_chat(ChatCompletionRequest(messages=said)).tolist()
            found, last_id = await ask(front, **body, stream=is_stream)
            assert found == owner
            said.append({"role": "assistant", "content": SAID})
        for _ in range(3):
            assert (await front.client.get(f"/v1/responses/{first_id}")).headers["x-kvist-worker"] == owner
            cancelled = await front.client.post(f"/v1/responses/{first_id}/cancel")
            assert cancelled.headers["x-kvist-worker"] == owner


@pytest.mark.parametrize(("policy", "obstacle"), [("kv", "unknown_conversation"), ("round-robin", "not_needed")])
async def test_what_is_not_known_goes_anywhere_and_is_counted(
    worker, router, responding, policy: str, obstacle: str
) -> None:
    async with (
        worker(answer=responding("a")) as one,
        worker(answer=responding("b")) as two,
        router(one.url, two.url, policy=policy, model_path=MODEL) as front,
    ):
        owners = {(await ask(front, input="go on", previous_response_id="resp_elsewhere"))[0] for _ in range(2)}
        assert policy == "kv" or owners == {one.url, two.url}
        series = f'kvist_router_readings_total{{api="responses",obstacle="{obstacle}",outcome="load only"}}'
        assert (await front.metrics())[series] == 2
        _, unstored = await ask(front, input="hello", store=False)
        assert front.service._forwarder.reader.conversations.get(unstored) is None


async def test_a_worker_that_is_gone_takes_its_conversations_along(worker, router, responding) -> None:
    async with (
        worker(answer=responding("a")) as one,
        worker(answer=responding("b")) as two,
        router(one.url, two.url, policy="round-robin", model_path=MODEL) as front,
    ):
        owner, first_id = await ask(front, input="hello")
        gone, other = (one, two) if owner == one.url else (two, one)
        gone.kill()
        await front.until_state(owner, "unhealthy")
        assert (await ask(front, input="and now?", previous_response_id=first_id))[0] == other.url


@pytest.mark.parametrize(
    ("answer", "is_event"),
    [
        (None, False),
        (b"", True),
        (b"oops", False),
        (b"\xff", False),
        (b"[]", False),
        (b'{"id": 5}', False),
        (b'{"type": "response.completed"}', True),
        (b'{"response": 5}', True),
        (b"null", False),
    ],
)
def test_an_answer_that_is_no_response_is_not_remembered(answer: bytes | None, is_event: bool) -> None:
    known = Conversations()
    known.record("http://w", None, answer, is_event=is_event)
    assert not known._stored


def test_what_was_said_is_known_where_the_request_was_and_the_response_is_whole() -> None:
    known, chat = Conversations(), ChatCompletionRequest(messages=[{"role": "user", "content": "hello"}])
    for name, asked, status in (
        ("unread", None, "completed"),
        ("queued", chat, "queued"),
        ("whole", chat, "incomplete"),
    ):
        answer = json.dumps(response_of(name, "hi", status=status)).encode()
        known.record("http://w", asked, answer, is_event=False)
    assert [known.get(name).messages for name in ("unread", "queued")] == [None, None]
    assert known.get("whole").messages == [*chat.messages, {"role": "assistant", "content": "hi"}]
    for odd in (5, [5], [{"type": "message", "content": 5}], [{"type": "message", "content": [{"text": 5}]}]):
        answer = json.dumps(response_of("odd", output=odd)).encode()
        known.record("http://w", chat, answer, is_event=False)
        assert known.get("odd").messages == chat.messages


def test_least_recently_used_are_dropped_beyond_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_BYTES", 10_000)
    monkeypatch.setattr(conversations, "MAX_RESPONSES", 50)
    known, chat = Conversations(), ChatCompletionRequest(messages=[{"role": "user", "content": "x" * 900}])
    for idx in range(40):
        known.record("http://w", chat, json.dumps(response_of(f"long{idx % 30}", "hi")).encode(), is_event=False)
        known.get("long0")
    num_bytes = sum(len(name) + len(stored.messages_json or b"") for name, stored in known._stored.items())
    assert num_bytes == known._num_bytes <= 10_000
    assert known.get("long0") is not None
    for idx in range(200):
        known.record("http://w", None, json.dumps(response_of(f"short{idx}")).encode(), is_event=False)
    assert (len(known._stored), known._num_bytes) == (50, sum(map(len, known._stored)))
    huge = ChatCompletionRequest(messages=[{"role": "user", "content": "x" * 20_000}])
    known.record("http://w", huge, json.dumps(response_of("huge")).encode(), is_event=False)
    assert known._num_bytes == 0
