from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from kvist.engine.async_engine import AsyncEngine, EngineOverloadedError, EngineStoppedError, Generation
from kvist.engine.request import RequestOutput, SequenceInput
from kvist.engine.runner import Runner
from kvist.errors import InvalidValueError
from kvist.openai.requests import RemoteDecode
from kvist.transfer.commands import Command, Offer, WithdrawOffer

PROMPT = list(range(3, 23))


@pytest_asyncio.fixture
async def engine(make_core) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(make_core("qwen3"), max_num_open=3) as engine:
        yield engine


async def collect(generation: Generation) -> dict[int, RequestOutput]:
    answers: dict[int, RequestOutput] = {}
    async with generation:
        async for index, output in generation.outputs():
            answers[index] = answers[index] + output if index in answers else output
    return answers


def is_idle(engine: AsyncEngine) -> bool:
    statistics = engine.statistics()
    counts = statistics.scheduler
    num_used = sum(pool.num_used for pool in statistics.kv_cache.pools)
    return counts.num_running == counts.num_waiting == num_used == 0


async def test_sequences_of_a_generation_come_back_by_index(engine: AsyncEngine, greedy) -> None:
    inputs = [SequenceInput(PROMPT, greedy(count)) for count in (3, 6)]
    answers = await collect(engine.generate(inputs))
    assert [len(answers[index].token_ids) for index in (0, 1)] == [3, 6]
    assert answers[0].token_ids == answers[1].token_ids[:3]
    assert all(answer.finish_reason == "length" for answer in answers.values())


async def test_a_slow_reader_gets_everything_in_one_output(
    engine: AsyncEngine, greedy, until: Callable[..., object]
) -> None:
    generation = engine.generate([SequenceInput(PROMPT, greedy(20))])
    await until(lambda: not generation._open)
    outputs = [output async for _, output in generation.outputs()]
    assert len(outputs) == 1
    assert len(outputs[0].token_ids) == 20


async def test_leaving_the_context_frees_the_blocks(engine: AsyncEngine, greedy, until) -> None:
    async with engine.generate([SequenceInput(PROMPT, greedy(400))]) as generation:
        async for _ in generation.outputs():
            break
    await until(lambda: is_idle(engine))


async def test_cancelling_the_reader_frees_the_blocks(engine: AsyncEngine, greedy, until) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async with engine.generate([SequenceInput(PROMPT, greedy(400))]) as generation:
            async for _ in generation.outputs():
                started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: is_idle(engine))


async def test_more_sequences_than_allowed_are_refused_and_counted(engine: AsyncEngine, greedy) -> None:
    async with engine.generate([SequenceInput(PROMPT, greedy(400))] * 3):
        with pytest.raises(EngineOverloadedError, match="3 open sequences"):
            engine.generate([SequenceInput(PROMPT, greedy(1))])
    assert engine.num_refused == 1
    await collect(engine.generate([SequenceInput(PROMPT, greedy(1))]))


async def test_a_prompt_that_cannot_be_served_queues_nothing(engine: AsyncEngine, greedy) -> None:
    with pytest.raises(InvalidValueError):
        engine.generate([SequenceInput(PROMPT, greedy(1)), SequenceInput([], greedy(1))])
    assert is_idle(engine)


async def test_flushing_forgets_the_prefix(engine: AsyncEngine, greedy) -> None:
    inputs = [SequenceInput(PROMPT, greedy(1))]
    await collect(engine.generate(inputs))
    assert (await collect(engine.generate(inputs)))[0].num_cached_tokens == 16
    await engine.flush_cache()
    assert (await collect(engine.generate(inputs)))[0].num_cached_tokens == 0


async def test_a_failed_step_is_an_error_to_its_client_alone(engine: AsyncEngine, greedy, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "forward", fail)
        answers = await collect(engine.generate([SequenceInput(PROMPT, greedy(3))]))
    assert answers[0].error == "the engine failed: device lost"
    assert (await collect(engine.generate([SequenceInput(PROMPT, greedy(3))])))[0].finish_reason == "length"


async def test_what_is_unfinished_at_the_end_gets_an_error(make_core, greedy) -> None:
    async with AsyncEngine(make_core("qwen3"), max_num_open=3) as engine:
        generation = engine.generate([SequenceInput(PROMPT, greedy(450))])
    outputs = [output async for _, output in generation.outputs()]
    assert outputs[-1].error == "the engine has stopped"
    with pytest.raises(EngineStoppedError):
        engine.generate([SequenceInput(PROMPT, greedy(1))])
    with pytest.raises(EngineStoppedError):
        await engine.flush_cache()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_when_the_thread_dies_nobody_waits_for_ever(make_core, greedy, monkeypatch) -> None:
    def bug(*_: object) -> None:
        raise AssertionError("our own bug")

    monkeypatch.setattr(Runner, "forward", bug)
    async with AsyncEngine(make_core("qwen3"), max_num_open=3) as engine:
        answers = await collect(engine.generate([SequenceInput(PROMPT, greedy(3))]))
        assert answers[0].error == "the engine has stopped"
        assert not engine.is_alive


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_flush_during_the_death_of_the_thread_is_told(make_core, monkeypatch) -> None:
    core = make_core("qwen3")
    monkeypatch.setattr(core.kv_cache, "flush", lambda: 1 / 0)
    async with AsyncEngine(core, max_num_open=3) as engine:
        with pytest.raises(EngineStoppedError):
            await engine.flush_cache()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_that_the_thread_dies_in_its_last_step_is_logged(make_core, greedy, until, monkeypatch, caplog) -> None:
    is_stepping, may_end = threading.Event(), threading.Event()

    def bug(*_: object) -> None:
        is_stepping.set()
        may_end.wait(60)
        raise AssertionError("our own bug")

    monkeypatch.setattr(Runner, "forward", bug)
    async with AsyncEngine(make_core("qwen3"), max_num_open=3) as engine:
        engine.generate([SequenceInput(PROMPT, greedy(3))])
        await until(is_stepping.is_set)
        engine.stop()
        may_end.set()
    assert "engine thread died" in caplog.messages


def test_a_step_that_outlasts_the_event_loop_ends_quietly(make_core, greedy, until, monkeypatch, caplog) -> None:
    core, is_stepping, may_end = make_core("qwen3"), threading.Event(), threading.Event()
    engine, step = AsyncEngine(core, max_num_open=3, close_timeout_s=0.0), core.step

    def step_slowly() -> list[RequestOutput]:
        outputs = step()
        if outputs:
            is_stepping.set()
            may_end.wait(60)
        return outputs

    async def leave_during_the_step() -> None:
        async with engine:
            engine.generate([SequenceInput(PROMPT, greedy(3))])
            await until(is_stepping.is_set)

    monkeypatch.setattr(core, "step", step_slowly)
    asyncio.run(leave_during_the_step())
    may_end.set()
    engine._thread.join(60)
    assert caplog.messages == []


@pytest.mark.parametrize("is_computed", [False, True])
async def test_a_prompt_held_for_a_client_that_left_while_or_after_it_was_computed_is_held_no_more(
    make_core, greedy, until, monkeypatch: pytest.MonkeyPatch, is_computed: bool
) -> None:
    core = make_core("qwen3")
    commands: list[Command] = []
    core.handoffs.attach(commands.append)
    async with AsyncEngine(core, max_num_open=3) as engine:
        loop, step = asyncio.get_running_loop(), core.step

        def leave_during_the_step() -> list[RequestOutput]:
            outputs = step()
            if outputs and not is_computed:
                loop.call_soon_threadsafe(asking.cancel)
            return outputs

        async def ask() -> None:
            async with engine.generate([SequenceInput(PROMPT, greedy(1), handoff=RemoteDecode())]) as generation:
                async for _ in generation.outputs():
                    pass
                raise asyncio.CancelledError

        monkeypatch.setattr(core, "step", leave_during_the_step)
        asking = asyncio.create_task(ask())
        await until(lambda: any(isinstance(command, WithdrawOffer) for command in commands))
        (offered,) = [command.remote_request_id for command in commands if isinstance(command, Offer)]
        assert [command.remote_request_id for command in commands if isinstance(command, WithdrawOffer)] == [offered]
