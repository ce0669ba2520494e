"""The router inside somebody else's gateway: the same decisions, and somebody else's requests."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvist.openai.errors import RequestError
from kvist.router import Router, RouterConfig

TOKENS = list(range(100, 180))
PATH = "/v1/completions"


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "prompt": TOKENS} | fields).encode()


async def test_requests_go_to_who_holds_their_prefix_and_count_there_until_they_end(worker, engine, until) -> None:
    async with worker() as one, worker() as other:
        with engine("one") as cache:
            one.server_info = cache.server_info
            async with Router(RouterConfig(worker_urls=(one.url, other.url), health_interval_s=0.05)) as router:
                cache.store(TOKENS)
                await until(
                    lambda: (
                        router.view.index.ranks(one.url)[0:1] and router.view.index.ranks(one.url)[0].num_blocks == 5
                    )
                )
                routed = await router.route(PATH, body(stream=True))
                assert (routed.worker, routed.decision.overlap_tokens) == (one.url, 64)
                assert (routed.body, routed.headers) == (body(stream=True), {})
                with routed:
                    assert router.view.load.running_requests(one.url) == 1
                    assert router.view.load.prefill_tokens(one.url) == 16
                    routed.answered()
                    assert router.view.load.prefill_tokens(one.url) == 0
                    routed.add_tokens(3)
                routed.finish()
                assert router.view.load.running_requests(one.url) == 0
                assert (await router.route(PATH, body(), {one.url})).worker == other.url


async def test_a_worker_that_fails_is_given_nothing_for_a_while(worker) -> None:
    async with worker() as one, Router(RouterConfig(worker_urls=(one.url,), breaker_failures=2)) as router:
        for _ in range(2):
            with pytest.raises(OSError, match="no answer"), await router.route(PATH, body()):
                raise OSError("no answer")
        with pytest.raises(RequestError) as refusal:
            await router.route(PATH, body())
        assert refusal.value.status == 503


async def test_only_an_answer_closes_a_circuit(worker) -> None:
    settings = {"breaker_failures": 1, "breaker_cooldown_s": 0.001}
    async with worker() as one, Router(RouterConfig(worker_urls=(one.url,), **settings)) as router:
        circuit = router.view.fleet.get(one.url).breaker
        (await router.route(PATH, body())).finish(has_failed=True)
        assert circuit.state == "open"
        await asyncio.sleep(0.01)
        (await router.route(PATH, body())).finish()  # the client left: nobody knows
        assert circuit.state == "open"
        with await router.route(PATH, body()) as routed:
            routed.answered()
        assert circuit.state == "closed"


async def test_only_a_trial_itself_gives_itself_up(worker) -> None:
    settings = {"breaker_failures": 1, "breaker_cooldown_s": 0.001}
    async with worker() as one, Router(RouterConfig(worker_urls=(one.url,), **settings)) as router:
        circuit = router.view.fleet.get(one.url).breaker
        early = await router.route(PATH, body())
        (await router.route(PATH, body())).finish(has_failed=True)
        await asyncio.sleep(0.01)
        trial = await router.route(PATH, body())
        early.finish()  # its client left
        assert circuit.state == "half-open"
        with pytest.raises(RequestError):
            await router.route(PATH, body())
        trial.finish()
        assert circuit.state == "open"


async def test_what_is_sent_has_the_models_own_name_and_the_workers_key(worker) -> None:
    config = {"aliases": {"gpt": {"m": 1}}, "worker_api_key": "k", "policy": "round-robin"}
    async with worker() as one, Router(RouterConfig(worker_urls=(one.url,), **config)) as router:
        asked = body(model="gpt", vllm_xargs={"kv_cache_report_mode": "full"})
        routed = await router.route(PATH, asked)
        assert json.loads(routed.body) == {"model": "m", "prompt": TOKENS, "vllm_xargs": {}}
        assert routed.headers == {"authorization": "Bearer k"}
        with pytest.raises(RequestError, match="model: got 'no'"):
            await router.route(PATH, body(model="no"))
        with pytest.raises(RequestError, match="body"):
            await router.route(PATH, b"{")


async def test_those_to_fall_back_to_are_ranked_by_what_they_hold(worker, engine, until) -> None:
    async with worker() as none, worker() as some, worker() as most:
        with engine("some") as less, engine("most") as more:
            some.server_info, most.server_info = less.server_info, more.server_info
            urls = (none.url, some.url, most.url)
            async with Router(RouterConfig(worker_urls=urls, health_interval_s=0.05)) as router:
                less.store(TOKENS[:32])
                more.store(TOKENS)
                index = router.view.index
                for url, num_blocks in ((some.url, 2), (most.url, 5)):
                    known = "live", num_blocks  # blocks count only once the stream has caught up
                    await until(lambda: [(x.state, x.num_blocks) for x in index.ranks(url)] == [known])  # noqa: B023
                choice = await router.choose(PATH, body())
                assert choice.decision.ranked_workers == [most.url, some.url, none.url]
                choice = choice.at(some.url)
                assert choice.decision.ranked_workers == [some.url, most.url, none.url]
                assert choice.decision.overlap_tokens == 32
                assert choice.at("http://elsewhere") is None
                with router.begin(choice, is_streamed=False) as routed:
                    assert routed.worker == some.url
                    assert router.view.load.prefill_tokens(some.url) == 48
