"""Several answers are several requests, and the client is told of one: its choices, its usage, its failure."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvist.router.prefill.split import MAX_ANSWERS, single_answer, split_bodies
from kvist.router.prompts import CHAT_PATH, COMPLETION_PATH, GENERATE_PATH, OneModel, ParsedRequest, PromptReader

LONG = list(range(1000, 1400))
MODELS = [{"id": "m", "object": "model", "owned_by": "vllm"}]
DETAILS = {"prompt_tokens_details": {"cached_tokens": 5}, "completion_tokens_details": None}


class Engines:
    """A pair whose answers tell of their seeds; what is told `broken` fails as it says."""

    def __init__(self, http_bytes: Any) -> None:
        self.bytes = http_bytes
        self.broken: dict[int, str] = {}

    async def prefill(self, received: Any, writer: asyncio.StreamWriter) -> None:
        params = {"do_remote_prefill": True, "remote_request_id": received.headers["x-request-id"]}
        writer.write(self.bytes.response(json.dumps({"choices": [], "kv_transfer_params": params}).encode()))

    async def decode(self, received: Any, writer: asyncio.StreamWriter) -> None:
        body = json.loads(received.body)
        assert body["kv_transfer_params"]["remote_request_id"] == received.headers["x-request-id"]
        seed, name = body["seed"], received.headers["x-request-id"]
        failure = self.broken.get(seed)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": seed, "total_tokens": 0} | DETAILS
        text = {"index": 0, "text": f"{seed} of {body['prompt'][0]}", "logprobs": {"token_logprobs": [-0.1 * seed]}}
        head = {"id": name, "created": seed, "object": "text_completion"}
        if failure == "bad":
            writer.write(self.bytes.response(b'{"error": {"message": "too long"}}', status=400))
        elif failure == "silent":
            await asyncio.Event().wait()
        elif not body.get("stream"):
            answer = b"[1]" if failure == "odd" else json.dumps(head | {"choices": [text], "usage": usage}).encode()
            writer.write(self.bytes.response(answer))
        else:
            chunks = [head | {"choices": [text]}] * 2 + [head | {"choices": [], "usage": usage}]
            events = [b": a comment\r\n\r\n", *(b"data: %b\r\n\r\n" % json.dumps(each).encode() for each in chunks)]
            sent = b"".join(events[:2] if failure == "broken" else [*events, b"data: [DONE]\n\n"])
            writer.write(self.bytes.event_stream_head)
            for start in range(0, len(sent), 25):
                writer.write(self.bytes.chunk(sent[start : start + 25]))
                await writer.drain()
            if failure == "broken":
                writer.transport.abort()
            else:
                writer.write(self.bytes.chunk(b""))


@pytest.fixture
def engines(http_bytes) -> Engines:
    return Engines(http_bytes)


@pytest.fixture
def fleet(worker, router, engines):
    p, d = worker(models=MODELS, answer=engines.prefill), worker(models=MODELS, answer=engines.decode)
    return (
        p,
        d,
        lambda: router(prefill_worker_urls=(p.url,), decode_worker_urls=(d.url,), policy="round-robin", max_attempts=1),
    )


async def test_choices_and_usage_are_those_of_one_answer(fleet) -> None:
    p, d, started = fleet
    prompts = [LONG, LONG[7:]]
    expected = [
        {"index": 2 * idx + seed - 3, "text": f"{seed} of {prompt[0]}", "logprobs": {"token_logprobs": [-0.1 * seed]}}
        for idx, prompt in enumerate(prompts)
        for seed in (3, 4)
    ]
    usage = {"prompt_tokens": 793, "completion_tokens": 14, "total_tokens": 807}
    usage |= {"prompt_tokens_details": {"cached_tokens": 10}, "completion_tokens_details": None}
    async with p, d, started() as front:
        answer = await front.complete(prompts, n=2, seed=3, logprobs=0)
        assert answer.json()["choices"] == expected
        assert answer.json()["usage"] == usage
        assert answer.headers["x-kvist-prefill-worker"] == p.url
        name = answer.headers["x-request-id"]
        assert [each.headers["x-request-id"] for each in d.completions] == [f"{name}-{idx}" for idx in range(4)]
        assert {name: json.loads(p.completions[3].body)[name] for name in ("n", "seed", "prompt", "logprobs")} == {
            "n": 1,
            "seed": 4,
            "prompt": LONG[7:],
            "logprobs": 0,
        }
        streamed = await front.complete(prompts, n=2, seed=3, stream=True, stream_options={"include_usage": True})
        events = [json.loads(each[6:]) for each in streamed.text.split("\n\n") if each.startswith("data: {")]
        assert streamed.text.endswith("\n\ndata: [DONE]\n\n")
        assert streamed.text.count("[DONE]") == 1
        assert {(each["id"], each["created"]) for each in events} == {(events[0]["id"], events[0]["created"])}
        assert (events[-1]["choices"], events[-1]["usage"]) == ([], usage)
        choices = [choice for each in events[:-1] for choice in each["choices"]]
        assert sorted(choices, key=lambda each: each["index"]) == [each for each in expected for _ in range(2)]
        account = front.service._forwarder.accounts["default", "m"]
        counted = (account.requests, account.prompt_tokens, account.cached_tokens, account.output_tokens)
        assert counted == (2, 2 * 793, 0, 2 * 14)
        shown = (await front.client.get("/ui/state?view=requests&since=0")).json()["requests"]
        assert [each["output_tokens"] for each in shown] == [14, 14]


async def test_one_prefill_worker_computes_a_prompt_for_all_of_its_answers(worker, router, engines) -> None:
    p, other = worker(models=MODELS, answer=engines.prefill), worker(models=MODELS, answer=engines.prefill)
    d = worker(models=MODELS, answer=engines.decode)
    async with p, other, d, router(prefill_worker_urls=(p.url, other.url), decode_worker_urls=(d.url,)) as front:
        await front.complete([LONG, LONG[1:]], n=4, seed=1)
        asked = [[json.loads(each.body)["prompt"] for each in who.completions] for who in (p, other)]
        for prompt in (LONG, LONG[1:]):
            assert sorted(prompts.count(prompt) for prompts in asked) == [0, 4]


async def test_one_rank_of_it_does(worker, router, engines, engine) -> None:
    p, d = worker(models=MODELS, answer=engines.prefill), worker(models=MODELS, answer=engines.decode)
    async with p, d:
        with engine("p-ranks", num_ranks=4) as cache:
            for rank in range(4):
                cache.store(list(range(rank, rank + 16)), rank)
            told = {"kv_event_sources": {p.url: (cache.publisher.endpoint,)}, "max_local_prefill_tokens": 0}
            async with router(prefill_worker_urls=(p.url,), decode_worker_urls=(d.url,), **told) as front:
                await front.until_ranks(p.url, 4)
                for start in range(3):
                    asked_before = len(p.completions)
                    await front.complete(LONG[start:], n=4, seed=1)
                    ranks = [each.headers["x-data-parallel-rank"] for each in p.completions[asked_before:]]
                    assert len(ranks) == 4
                    assert len(set(ranks)) == 1


@pytest.mark.parametrize(
    ("failure", "is_stream", "status", "said"),
    [
        ("bad", False, 400, '{"error": {"message": "too long"}}'),
        ("bad", True, 400, '{"error": {"message": "too long"}}'),
        ("odd", False, 502, "a worker's answer cannot be read"),
        ("broken", True, 200, "closed the connection"),
    ],
)
async def test_the_first_that_fails_is_the_end_of_all(
    fleet, engines, until, failure: str, is_stream: bool, status: int, said: str
) -> None:
    p, d, started = fleet
    async with p, d, started() as front:
        engines.broken = {1: "", 2: failure, 3: ""} if failure == "odd" else {1: "silent", 2: failure, 3: "silent"}
        answer = await front.complete(LONG, n=3, seed=1, stream=is_stream)
        assert (answer.status_code, answer.text.count(said)) == (status, 1)
        assert "[DONE]" not in answer.text
        load, url = front.service._forwarder.load, d.url
        await until(lambda: load.running_requests(url) == 0)
        counted = await front.metrics()
        num_left = counted.get(f'kvist_router_requests_total{{policy="round-robin",status="499",worker="{url}"}}', 0)
        assert num_left == [*engines.broken.values()].count("silent")


@pytest.mark.parametrize(
    ("seed", "following"),
    [
        (None, []),
        (7, [8, 9]),
        (-2, [-1, 0]),
        (-(2**63), [1 - 2**63, 2 - 2**63]),
        (2**63 - 2, [2**63 - 1, 0]),
        (2**63, [2**63 + 1, 2**63 + 2]),
        (2**64 - 1, [0, 1]),
        (2**70, [2**70 + 1, 2**70 + 2]),
    ],
)
def test_each_answers_seed_is_one_that_whoever_takes_the_clients_takes(seed: int | None, following: list[int]) -> None:
    body = json.dumps({"prompt": [LONG, LONG], "n": 3} | ({} if seed is None else {"seed": seed})).encode()
    seeds = [
        json.loads(each).get("seed")
        for each in split_bodies(ParsedRequest("m", 800, num_prompts=2, fields=json.loads(body)), body)
    ]
    assert seeds == ([None] * 3 if seed is None else [seed, *following]) * 2


async def test_a_batch_of_token_ids_is_split_although_they_were_not_parsed() -> None:
    batch = [[1, 2], [3], [4, 5, 6]]
    body = json.dumps({"prompt": batch, "n": 2}).encode()
    parsed = await PromptReader(OneModel(None), lambda: True).read(COMPLETION_PATH, body)
    assert parsed.fields["prompt"] != batch
    split = [json.loads(each) for each in split_bodies(parsed, body)]
    assert split == [{"prompt": prompt, "n": 1} for prompt in batch for _ in range(2)]


@pytest.mark.parametrize(
    ("path", "fields", "is_one"),
    [
        (COMPLETION_PATH, {"n": 2}, True),
        (CHAT_PATH, {"n": MAX_ANSWERS // 2, "best_of": 1, "stream_options": {"include_usage": True}}, True),
        (CHAT_PATH, {"n": MAX_ANSWERS // 2 + 1}, False),
        (CHAT_PATH, {"n": "2"}, False),
        (CHAT_PATH, {"n": 2.0}, False),
        (CHAT_PATH, {"n": -1}, False),
        (COMPLETION_PATH, {"n": 2, "best_of": 3}, False),
        (COMPLETION_PATH, {"n": 2, "use_beam_search": True}, False),
        (COMPLETION_PATH, {"n": 2, "stream_options": {"continuous_usage_stats": True}}, False),
        (COMPLETION_PATH, {"n": 2, "seed": 3.0}, False),
        (COMPLETION_PATH, {"n": 2, "seed": 2**64}, True),
        (GENERATE_PATH, {"n": 2}, False),
    ],
)
def test_answers_that_need_each_other_are_one_request(path: str, fields: dict[str, Any], *, is_one: bool) -> None:
    one = single_answer(ParsedRequest("m", 800, num_prompts=2, fields=fields, path=path))
    assert (one is not None) == is_one
    if one is not None:
        assert (one.num_tokens, one.num_prompts, one.fields["n"]) == (400, 1, 1)
