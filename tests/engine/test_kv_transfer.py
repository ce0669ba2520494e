"""Two engines with a transfer service each, in one process: real sockets, real shared memory, real answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from kvist.engine.async_engine import AsyncEngine
from kvist.engine.config import EngineConfig
from kvist.engine.loading import LoadedEngine, load_engine
from kvist.engine.request import RequestOutput, SequenceInput
from kvist.events import FULL
from kvist.openai.requests import RemoteDecode, RemotePrefill
from kvist.transfer.agents import SharedMemoryAgent
from kvist.transfer.bounce import Bounce
from kvist.transfer.commands import Report, TransferLimits, WithdrawOffer
from kvist.transfer.copier import TorchCopier
from kvist.transfer.heads import WHOLE
from kvist.transfer.messages import (
    PROTOCOL_VERSION,
    Ping,
    PoolPlace,
    ReceiveRequest,
    RefusalReason,
    ResultStatus,
    decode_message,
    encode_message,
    group_shapes,
)
from kvist.transfer.service import KvTransferService, make_hello

pytestmark = pytest.mark.usefixtures("workers_of_one_process")

B = 4
FAST = TransferLimits(transfer_timeout_s=1.0, hold_timeout_s=1.0, cancel_retry_s=0.1)


def make_prompt(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(count)]


@dataclass
class Worker:
    loaded: LoadedEngine
    engine: AsyncEngine
    service: KvTransferService

    async def answer(self, prompt: list[int], params: Any, handoff: Any = None) -> RequestOutput:
        answer = None
        async with self.engine.generate([SequenceInput(prompt, params, handoff=handoff)]) as generation:
            async for _, output in generation.outputs():
                answer = output if answer is None else answer + output
        assert answer is not None
        return answer

    async def prefill(self, prompt: list[int], params: Any) -> RemotePrefill:
        answer = await self.answer(prompt, params, RemoteDecode())
        assert answer.error is None
        assert answer.remote_request_id is not None
        return RemotePrefill((self.service.endpoint,), answer.remote_request_id, len(prompt))

    @asynccontextmanager
    async def prefilling(self, prompt: list[int], params: Any) -> AsyncIterator[RemotePrefill]:
        """Compute a prompt, and tell where it can be fetched as soon as that is known."""
        async with self.engine.generate([SequenceInput(prompt, params, handoff=RemoteDecode())]) as generation:
            async for _, output in generation.outputs():
                assert output.remote_request_id is not None, output.error
                yield RemotePrefill((self.service.endpoint,), output.remote_request_id, len(prompt))
                break

    @property
    def num_used(self) -> int:
        return self.engine.statistics().kv_cache.num_used


@pytest.fixture
def open_worker(checkpoint: Callable[[str], Path]) -> Callable[..., Any]:
    @asynccontextmanager
    async def open_(
        name: str,
        limits: TransferLimits | None = None,
        is_fallback_allowed: bool = True,
        model: str = "m",
        has_bounce: bool = False,
        **settings: Any,
    ) -> AsyncIterator[Worker]:
        agent = SharedMemoryAgent(f"agent-{random.getrandbits(64):x}")
        defaults: dict[str, Any] = {"block_size": B, "num_blocks": 128, "max_model_len": 256}
        config = EngineConfig(model_dir=checkpoint(name), **(defaults | settings))
        loaded = load_engine(config, None, lambda size: torch.from_numpy(agent.allocate(size)))
        pools = []
        for pool in loaded.tensors.pools:
            agent.register(pool.data_ptr(), pool.nbytes)
            pools.append(PoolPlace(pool.data_ptr(), pool[0].nbytes, len(pool)))
        bounce = None
        if has_bounce:
            copier = TorchCopier(loaded.tensors.pools)
            bounce = Bounce(agent, copier, lambda: torch.from_numpy(agent.allocate(1 << 20)))
            bounce.max_fragment_bytes = 1 << 40
        hello = make_hello(model, config.block_size, group_shapes(loaded.whole_plan), tuple(pools), agent)
        engine = AsyncEngine(loaded.core, max_num_open=40)

        def report(report: Report) -> None:
            engine.submit(partial(loaded.core.on_report, report))

        service = KvTransferService("tcp://127.0.0.1:*", agent, hello, report, limits, bounce)
        loaded.core.handoffs.attach(service.command, is_fallback_allowed=is_fallback_allowed)
        async with engine:
            service.start()
            try:
                yield Worker(loaded, engine, service)
            finally:
                service.close()

    return open_


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bounced": {"has_bounce": True},
    "chunks and scratch slots": {"has_swa_scratch": True, "max_num_batched_tokens": 23, "max_num_seqs": 5},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
async def test_many_prompts_at_once_are_answered_as_by_one_worker(
    name: str, variant: str, open_worker, greedy, until
) -> None:
    stem = make_prompt(30)
    prompts = [[*stem[: 5 * i], *make_prompt(3 + 4 * i, i)] for i in range(7)] + [stem, stem]
    async with (
        open_worker(name, **VARIANTS[variant]) as source,
        open_worker(name, **VARIANTS[variant]) as target,
        open_worker(name) as alone,
    ):

        async def both(prompt: list[int]) -> RequestOutput:
            async with source.prefilling(prompt, greedy(15)) as remote:
                return await target.answer(prompt, greedy(15), remote)

        answers = await asyncio.gather(*map(both, prompts))
        expected = await asyncio.gather(*(alone.answer(prompt, greedy(15)) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        await until(lambda: source.num_used == target.num_used == 0)
        sent, received = source.service.statistics(), target.service.statistics()
        assert sent.bytes_written == received.bytes_received > 0
        assert received.quarantined_bytes == 0
        assert (sent.bounce.bytes_sent > 0) == (variant == "bounced")
        for each in (sent.bounce, received.bounce):
            assert each.used_bytes == each.quarantined_bytes == 0
        assert source.engine.statistics().handoffs.num_sent == len(prompts)
        handoffs = target.engine.statistics().handoffs
        assert (handoffs.num_fetched, handoffs.num_fallbacks) == (len(prompts), 0)


@pytest.mark.parametrize("seed", range(3))
async def test_a_long_mix_of_everything_leaves_nothing_behind(seed: int, open_worker, greedy, until) -> None:
    rng = random.Random(seed)
    stems = [make_prompt(60, i) for i in range(3)]
    tight = {"num_blocks": 70, "max_num_seqs": 6, "max_num_batched_tokens": 30, "has_bounce": bool(seed % 2)}
    async with (
        open_worker("gemma3", FAST, **tight) as source,
        open_worker("gemma3", FAST, **tight) as target,
        open_worker("gemma3") as alone,
    ):
        answers: list[tuple[list[int], RequestOutput]] = []

        async def live(prompt: list[int], kind: str) -> None:
            params = greedy(rng.randrange(1, 20))
            if kind == "local":
                answers.append((prompt, await target.answer(prompt, params)))
                return
            async with source.prefilling(prompt, params) as remote:
                if kind == "left":
                    return
                if kind == "unknown":
                    remote = RemotePrefill(remote.remote_endpoints, "nobody's", remote.num_tokens)
                answers.append((prompt, await target.answer(prompt, params, remote)))

        kinds = ["local", "fetched", "fetched", "fetched", "aborted", "left", "unknown"]
        tasks = []
        for i in range(40):
            prompt = [*rng.choice(stems)[: rng.randrange(61)], *make_prompt(rng.randrange(1, 30), 100 + i)]
            kind = rng.choice(kinds)
            tasks.append(asyncio.create_task(live(prompt, kind)))
            for _ in range(rng.randrange(40)):
                await asyncio.sleep(0)
            if kind == "aborted":
                tasks[-1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        failed = [str(task.exception()) for task in tasks if not task.cancelled() and task.exception()]
        assert all("nobody fetches the prompt" in each for each in failed), failed  # where a machine is too busy
        await until(lambda: source.num_used == target.num_used == 0)
        for worker in (source, target):
            statistics = worker.service.statistics()
            assert statistics.quarantined_bytes == 0
            assert statistics.num_writing == 0
            assert statistics.bounce.used_bytes == 0
        for prompt, answer in answers:
            if answer.error is None:
                expected = await alone.answer(prompt, greedy(len(answer.token_ids)))
                assert answer.token_ids == expected.token_ids
        assert target.engine.statistics().handoffs.num_fetched > 5


async def test_only_the_bytes_move_that_each_group_lacks_itself(open_worker, greedy, until) -> None:
    prompt, received = make_prompt(30), [0]
    async with open_worker("gemma3") as source, open_worker("gemma3") as target:
        pools = target.loaded.core.kv_cache.pools
        for _ in range(2):
            async with source.prefilling(prompt, greedy(5)) as remote:
                await target.answer(prompt, greedy(5), remote)
            await until(lambda: target.num_used == 0)
            received.append(target.service.statistics().bytes_received)
            for pool in pools:  # windows are forgotten before what full attention needs
                if pool.group.window is not FULL:
                    pool.forget_free()
        slot_bytes = [pool[0].nbytes for pool in target.loaded.tensors.pools]
        (full_bytes,) = [size for size, pool in zip(slot_bytes, pools, strict=True) if pool.group.window is FULL]
        first, second = received[1], received[2] - received[1]
        assert first - second == (len(prompt) // B) * full_bytes, "all but its last block, which is not whole"
        assert second > full_bytes, "and the windows' blocks once more"


@pytest.mark.parametrize("way", ["piece by piece", "bounced", "piece by piece as the region is full"])
async def test_the_fetched_bytes_are_those_of_the_sender(way: str, open_worker, greedy, until) -> None:
    prompt, is_bounced = make_prompt(61), way == "bounced"
    options = {"has_bounce": way != "piece by piece"}
    async with open_worker("gemma3", **options) as source, open_worker("gemma3", **options) as target:
        bounce = target.service._bounce
        taken = bounce.reserve(1 << 20, 2) if options["has_bounce"] and not is_bounced else None
        offers, fetches = [], []
        for notes, worker in ((offers, source), (fetches, target)):
            handoffs = worker.loaded.core.handoffs
            handoffs._command = lambda each, n=notes, o=handoffs._command: (n.append(each), o(each))
        remote = await source.prefill(prompt, greedy(1))
        before = [pool.clone() for pool in source.loaded.tensors.pools]
        assert (await target.answer(prompt, greedy(1), remote)).token_ids == (offers[-1].first_token_id,)
        num_compared = 0
        for group_id, (from_pool, to_pool) in enumerate(zip(before, target.loaded.tensors.pools, strict=True)):
            pairs = zip(offers[-1].block_ids_per_group[group_id], fetches[0].block_ids_per_group[group_id], strict=True)
            for from_id, to_id in pairs:
                assert (from_id < 0) == (to_id < 0)
                if to_id >= 0:
                    assert to_pool[to_id].equal(from_pool[from_id])
                    num_compared += 1
        assert num_compared == 16 + 3
        await until(lambda: source.num_used == target.num_used == 0)
        assert (source.service.statistics().bounce.bytes_sent > 0) == is_bounced
        if taken is not None:
            bounce.release(taken)
        for worker in (source, target):
            statistics = worker.service.statistics().bounce
            assert statistics.used_bytes == statistics.quarantined_bytes == 0


async def test_a_prompt_that_nobody_fetches_is_given_up(open_worker, greedy, until) -> None:
    async with open_worker("gemma3", FAST) as source:
        await source.prefill(make_prompt(30), greedy(5))
        handoffs = source.engine.statistics().handoffs
        assert handoffs.num_held + handoffs.num_given_up == 1  # it is held for a second, which may have passed
        await until(lambda: source.num_used == 0)
        handoffs = source.engine.statistics().handoffs
        assert (handoffs.num_held, handoffs.num_given_up) == (0, 1)


@pytest.mark.parametrize("fault", ["unknown request", "nobody there", "model", "block size"])
async def test_a_fetch_that_cannot_be_is_computed_here(fault: str, open_worker, greedy, until) -> None:
    prompt = make_prompt(30)
    different = {"model": {"model": "another"}, "block size": {"block_size": 2 * B}}.get(fault, {})
    async with open_worker("gemma3", FAST, **different) as source, open_worker("gemma3", FAST) as target:
        endpoint = "tcp://127.0.0.1:1" if fault == "nobody there" else source.service.endpoint
        remote = RemotePrefill((endpoint,), "nobody's", len(prompt))
        expected = await source.answer(prompt, greedy(8))
        assert (await target.answer(prompt, greedy(8), remote)).token_ids == expected.token_ids
        assert target.engine.statistics().handoffs.num_fallbacks == 1
        await until(lambda: target.num_used == 0)
        assert target.service.statistics().quarantined_bytes == 0
        good = await source.prefill(prompt, greedy(8))
        assert (await target.answer(prompt, greedy(8), good)).token_ids == expected.token_ids
        await until(lambda: source.num_used == target.num_used == 0)
        refused = source.service.statistics().num_refused_greetings
        assert bool(refused) == bool(different)


async def test_a_silent_sender_fails_the_fetch_and_keeps_its_blocks_until_it_is_known_to_have_ended(
    open_worker, greedy, until
) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        silent.setsockopt(zmq.LINGER, 0)
        silent.bind("tcp://127.0.0.1:*")
        endpoint = silent.getsockopt_string(zmq.LAST_ENDPOINT)
        async with open_worker("gemma3", FAST, is_fallback_allowed=False) as target:
            remote = RemotePrefill((endpoint,), "x", 30)
            answer = await target.answer(make_prompt(30), greedy(3), remote)
            assert answer.error == "kv transfer failed: no completion within 1 s"
            assert target.num_used > 0
            assert target.service.statistics().quarantined_bytes > 0
            silent.close()
            await until(lambda: target.num_used == 0)
            assert target.service.statistics().quarantined_bytes == 0


async def test_an_aborted_fetch_leaves_nothing_on_either_side(open_worker, greedy, until) -> None:
    async with open_worker("gemma3", FAST) as source, open_worker("gemma3", FAST) as target:
        for i in range(6):
            remote = await source.prefill(make_prompt(40, i), greedy(5))
            task = asyncio.create_task(target.answer(make_prompt(40, i), greedy(50), remote))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: source.num_used == target.num_used == 0)


def request_of(target: Any, name: str, block_ids: tuple[tuple[int, ...], ...]) -> ReceiveRequest:
    return ReceiveRequest(PROTOCOL_VERSION, 7, target.service._sender._hello, WHOLE, name, 30, block_ids)


async def test_what_no_receiver_would_say_is_refused_or_counted(open_worker, greedy, until) -> None:
    prompt = make_prompt(30)
    async with open_worker("gemma3") as source, open_worker("gemma3") as target:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.setsockopt(zmq.RCVTIMEO, 60_000)
            stranger.connect(source.service.endpoint)

            async def hear() -> Any:
                while isinstance(answer := decode_message(await asyncio.to_thread(stranger.recv), "source"), Ping):
                    pass
                return answer

            async def answer_to(*frames: bytes) -> Any:
                stranger.send_multipart(frames)
                return await hear()

            async def ask(message: Any) -> Any:
                return await answer_to(encode_message(message))

            for frames in ([b""], [b"x", b"y"], [b"\xff" * 40], [b"", b"", b""]):
                assert (await answer_to(*frames)).reason is RefusalReason.MALFORMED
            assert source.service.statistics().num_malformed == 4
            remote = await source.prefill(prompt, greedy(5))
            wrong = request_of(target, remote.remote_request_id, ((1, 2, 3), (500,)))
            refusal = await ask(msgspec.structs.replace(wrong, protocol_version=9, request_id="nobody's"))
            assert refusal.reason is RefusalReason.PROTOCOL_VERSION
            assert (await hear()).status is ResultStatus.CANCELLED, "what is refused is not held for it"
            assert (await ask(msgspec.structs.replace(wrong, transfer_id=8))).reason is RefusalReason.UNKNOWN_BLOCK
        source.service.command(WithdrawOffer(remote.remote_request_id))
        good = await source.prefill(prompt, greedy(5))
        expected = await source.answer(prompt, greedy(5))
        assert (await target.answer(prompt, greedy(5), good)).token_ids == expected.token_ids
        assert target.engine.statistics().handoffs.num_fetched == 1
        await until(lambda: source.num_used == target.num_used == 0)


async def test_strangers_that_share_one_memory_and_leave_end_nothing(open_worker, greedy, until) -> None:
    prompt = make_prompt(30)
    async with open_worker("gemma3") as source, open_worker("gemma3") as target:
        outgoing = source.service._sender
        with zmq.Context() as context, ExitStack() as strangers:
            for name in (b"\xff1", b"\xff2"):
                stranger = strangers.enter_context(context.socket(zmq.DEALER))
                stranger.setsockopt(zmq.LINGER, 0)
                stranger.setsockopt(zmq.RCVTIMEO, 60_000)
                stranger.setsockopt(zmq.IDENTITY, name)
                stranger.connect(source.service.endpoint)
                stranger.send_multipart([encode_message(request_of(target, "nobody's", ((), ())))])
                await asyncio.to_thread(stranger.recv_multipart)
            assert len(outgoing._receivers) == 2
        await until(lambda: not outgoing._receivers or not source.service._thread.is_alive())
        assert source.service._thread.is_alive()
        good = await source.prefill(prompt, greedy(5))
        expected = await source.answer(prompt, greedy(5))
        assert (await target.answer(prompt, greedy(5), good)).token_ids == expected.token_ids
        assert target.engine.statistics().handoffs.num_fetched == 1
