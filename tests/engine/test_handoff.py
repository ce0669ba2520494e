"""Prompts computed by one engine and decoded by another, their blocks copied by hand, step by step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from late_device import late_devices
from memory_invariants import check_engine

from kvist.engine import handoff
from kvist.engine.config import EngineConfig
from kvist.engine.core import EngineCore
from kvist.engine.loading import LoadedEngine, load_engine
from kvist.engine.request import RequestOutput, RequestTimes, SequenceInput
from kvist.errors import InvalidValueError
from kvist.events import FULL
from kvist.kvcache import ABSENT, num_stale_blocks
from kvist.openai.requests import RemoteDecode, RemotePrefill, SamplingParams
from kvist.transfer.commands import (
    CancelFetch,
    Command,
    Computed,
    Fetch,
    FetchCompleted,
    FetchFailed,
    FetchReleased,
    OfferReleased,
    WithdrawOffer,
)

B = 4
GREEDY_ONCE = SamplingParams(max_tokens=1, temperature=0.0)


def make_prompt(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(count)]


@dataclass
class Notes:
    """Transfers that do nothing but note what they are asked, and which prompts were computed in part, or whole."""

    chunks: list[Computed] = field(default_factory=list)
    offered: list[Computed] = field(default_factory=list)
    wanted: list[Fetch] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)

    def command(self, command: Command) -> None:
        match command:
            case Computed(is_whole=is_whole):
                (self.offered if is_whole else self.chunks).append(command)
            case Fetch():
                self.wanted.append(command)
            case CancelFetch(request_id):
                self.cancelled.append(request_id)
            case WithdrawOffer(remote_request_id):
                self.withdrawn.append(remote_request_id)


@dataclass
class Worker:
    loaded: LoadedEngine
    notes: Notes
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)

    @property
    def core(self) -> EngineCore:
        return self.loaded.core

    def run(self) -> None:
        """Step until nothing is left to do, checking the memory after each."""
        while self.core.has_work:
            for output in self.core.step():
                self.outputs.setdefault(output.request_id, []).append(output)
            check_engine(self.core)

    def tokens(self, request_id: str) -> list[int]:
        return [token_id for output in self.outputs[request_id] for token_id in output.token_ids]

    @property
    def num_used(self) -> int:
        return self.core.statistics().kv_cache.num_used


@pytest.fixture
def make_worker(checkpoint: Callable[[str], Path]) -> Callable[..., Worker]:
    def make(name: str, is_fallback_allowed: bool = True, **settings: Any) -> Worker:
        defaults: dict[str, Any] = {"block_size": B, "num_blocks": 128, "max_model_len": 256}
        loaded = load_engine(EngineConfig(model_dir=checkpoint(name), **(defaults | settings)))
        worker = Worker(loaded, Notes())
        loaded.core.handoffs.attach(worker.notes.command, is_fallback_allowed=is_fallback_allowed)
        return worker

    return make


@pytest.fixture
def make_late_worker(make_worker: Callable[..., Worker]) -> Iterator[Callable[..., Worker]]:
    """Make workers with devices like GPUs, and check that no step still uses the blocks that transfers get."""
    with late_devices() as devices:

        def make(name: str, **settings: Any) -> Worker:
            worker = make_worker(name, **settings)
            device = devices(worker.core._runner)

            def command(command: Command) -> None:
                device.check(command, B)
                worker.notes.command(command)

            worker.core.handoffs.attach(command)
            return worker

        yield make


def prefill(worker: Worker, request_id: str, prompt: list[int], params: Any) -> RemotePrefill:
    """Compute a prompt and its first token; return where the rest is to go on from."""
    worker.core.add_request(request_id, SequenceInput(prompt, params, handoff=RemoteDecode()))
    worker.run()
    last = worker.outputs[request_id][-1]
    assert last.finish_reason is not None
    assert last.remote_request_id == worker.notes.offered[-1].remote_request_id
    assert worker.tokens(request_id) == [worker.notes.offered[-1].first_token_id]
    return RemotePrefill(("tcp://here:1",), last.remote_request_id, len(prompt))


def copy(source: Worker, target: Worker, wanted: Fetch) -> int:
    """Copy the wanted blocks; return how many there were. Those that are not wanted come first."""
    offered = next(o for o in source.notes.offered if o.remote_request_id == wanted.remote_request_id)
    blocks = target.core._requests[wanted.request_id].blocks
    assert blocks is not None
    num_copied = 0
    for group_id, (theirs, ours, table) in enumerate(
        zip(offered.block_ids_per_group, wanted.block_ids_per_group, blocks.tables, strict=True)
    ):
        held = list(table.block_ids)
        assert [each == ABSENT for each in theirs] == [each == ABSENT for each in held], "the two see different blocks"
        from_pool, to_pool = source.loaded.tensors.pools[group_id], target.loaded.tensors.pools[group_id]
        for from_id, to_id, held_id in zip(theirs, ours, held, strict=True):
            if to_id != ABSENT:
                to_pool[to_id] = from_pool[from_id]
                num_copied += 1
            elif held_id != ABSENT:
                assert to_pool[held_id].equal(from_pool[from_id]), "a cached block differs"
    return num_copied


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "chunked prefill": ({"max_num_batched_tokens": 7, "max_num_seqs": 3}, {}),
    "scratch slots": ({"has_swa_scratch": True}, {"has_swa_scratch": True}),
    "no prefix cache": ({"has_prefix_cache": False}, {"has_prefix_cache": False}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-sliding"])
def test_what_is_decoded_elsewhere_is_what_one_worker_would_say(name: str, variant: str, make_worker, greedy) -> None:
    source, target = (make_worker(name, **settings) for settings in VARIANTS[variant])
    alone = make_worker(name)
    stem = make_prompt(33)
    prompts = [stem, [*stem, *make_prompt(12, 1)], make_prompt(40, 2), stem[:24], make_prompt(3, 3), [*stem, 5, 6, 7]]
    num_wanted = num_copied = 0
    for i, prompt in enumerate(prompts):
        alone.core.add_request(str(i), SequenceInput(prompt, greedy(20)))
        remote = prefill(source, str(i), prompt, greedy(20))
        target.core.add_request(str(i), SequenceInput(prompt, greedy(20), handoff=remote))
        target.run()
        wanted = target.notes.wanted[-1]
        num_copied += copy(source, target, wanted)
        num_wanted += sum(each != ABSENT for ids in source.notes.offered[-1].block_ids_per_group for each in ids)
        target.core.on_report(FetchCompleted(str(i), source.notes.offered[-1].first_token_id))
        source.core.on_report(OfferReleased(remote.remote_request_id, True))
        target.run()
        alone.run()
        assert target.tokens(str(i)) == alone.tokens(str(i))
        assert target.outputs[str(i)][-1].finish_reason == "length"
    assert source.num_used == target.num_used == 0
    assert (num_copied < num_wanted) == (variant != "no prefix cache"), "a prefix that is there is not fetched again"


def hold_prefix(worker: Worker, request_id: str, prompt: list[int], max_cached_tokens: int) -> RequestOutput:
    """Hold what is cached of a prompt, which takes no step."""
    handoff = RemoteDecode(max_cached_tokens)
    worker.core.add_request(request_id, SequenceInput(prompt, GREEDY_ONCE, handoff=handoff))
    (output,) = worker.core.step()
    assert (output.request_id, output.token_ids, output.finish_reason) == (request_id, (), "length")
    assert not worker.core.has_work
    return output


@pytest.mark.parametrize("is_filled", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-sliding"])
def test_a_prefix_that_is_cached_elsewhere_is_fetched_and_the_rest_computed(
    name: str, is_filled: bool, make_worker, greedy
) -> None:
    source, target, alone = (make_worker(name) for _ in range(3))
    stem = make_prompt(33)
    source.core.add_request("stem", SequenceInput(stem, greedy(1)))
    source.run()
    held = [(stem[:18], 16, 16), (stem, 100, 32), ([*stem, *make_prompt(12, 1)], 100, 32), ([*stem, 5, 6], 28, 28)]
    for i, (prompt, max_cached_tokens, num_held) in enumerate(held):
        offer = hold_prefix(source, str(i), prompt, max_cached_tokens)
        assert offer.num_cached_tokens == num_held
        remote = RemotePrefill(("tcp://here:1",), offer.remote_request_id or "", num_held)
        target.core.add_request(str(i), SequenceInput(prompt, greedy(20), handoff=remote))
        target.run()
        if is_filled:
            copy(source, target, target.notes.wanted[-1])
            target.core.on_report(FetchCompleted(str(i), None))
        else:
            target.core.on_report(FetchFailed(str(i), "the sender has died"))
            target.core.on_report(FetchReleased(str(i)))
        source.core.on_report(OfferReleased(remote.remote_request_id, is_filled))
        alone.core.add_request(str(i), SequenceInput(prompt, greedy(20)))
        target.run()
        alone.run()
        assert target.tokens(str(i)) == alone.tokens(str(i))
        assert not is_filled or target.outputs[str(i)][0].num_cached_tokens >= num_held
    assert source.num_used == target.num_used == 0
    assert hold_prefix(source, "other", make_prompt(33, 9), 100).remote_request_id is None


def test_a_prompt_that_is_computed_elsewhere_can_begin_a_longer_one(make_worker, greedy) -> None:
    source, target, alone = (make_worker("gemma3") for _ in range(3))
    stem = make_prompt(22)
    prompt = [*stem, *make_prompt(15, 1)]
    alone.core.add_request("0", SequenceInput(prompt, greedy(12)))
    alone.run()
    remote = prefill(source, "0", stem, greedy(12))
    target.core.add_request("0", SequenceInput(prompt, greedy(12), handoff=remote))
    target.run()
    copy(source, target, target.notes.wanted[0])
    target.core.on_report(FetchCompleted("0", source.notes.offered[-1].first_token_id))
    target.run()
    assert target.tokens("0") == alone.tokens("0")


def test_prefixes_alone_tell_how_fast_prompts_are_fetched(make_worker, greedy) -> None:
    target = make_worker("llama")
    target.core.handoffs.attach(target.notes.command, tokens_per_s=1000.0)
    speeds = []
    for num_tokens, first_token_id in ((20, 5), (16, None)):
        remote = RemotePrefill(("tcp://here:1",), "held", num_tokens)
        target.core.add_request(str(num_tokens), SequenceInput(make_prompt(20), greedy(2), handoff=remote))
        target.run()
        target.core.on_report(FetchCompleted(str(num_tokens), first_token_id))
        speeds.append(target.core.statistics().handoffs.tokens_per_s)
    assert speeds[0] == 1000.0 != speeds[1]


def test_how_fast_prompts_are_fetched_is_learnt_and_a_failure_forgotten_in_minutes() -> None:
    speed = handoff.FetchSpeed(1000.0)
    assert speed.tokens_per_s(50.0) == 1000.0
    for at_s in range(100, 110):
        speed.add(500, at_s, at_s + 0.1)
    learnt = speed.tokens_per_s(110.0)
    assert 4000 < learnt < 5000
    speed.add(0, 110.0, 140.0)
    failed = speed.tokens_per_s(140.0)
    assert failed < 200
    assert failed < speed.tokens_per_s(200.0) < speed.tokens_per_s(600.0)
    assert speed.tokens_per_s(1e4) == pytest.approx(1000.0)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_prompt_is_offered_chunk_by_chunk_and_what_is_told_of_stays_as_it_is(name: str, make_worker, greedy) -> None:
    source = make_worker(name, max_num_batched_tokens=7, max_num_seqs=3)
    prompt = make_prompt(31)
    prefill(source, "0", prompt, greedy(5))
    first, last = source.outputs["0"]
    assert (first.token_ids, first.remote_request_id) == ((), last.remote_request_id)
    told = [*source.notes.chunks, *source.notes.offered]
    assert [(each.is_whole, each.first_token_id) for each in told[:5]] == [(False, None)] * 5
    for group_id, pool in enumerate(source.core.kv_cache.pools):
        lists = [each.block_ids_per_group[group_id] for each in told]
        first_wanted = num_stale_blocks(31, pool.group.window, B)
        assert [len(each) for each in lists] == [max(first_wanted, n) for n in (0, 1, 3, 5, 7, 8)]
        assert all(lists[-1][: len(each)] == each for each in lists)
        assert [block_id == ABSENT for block_id in lists[-1]] == [i < first_wanted for i in range(8)]


def test_a_prompt_that_nothing_waits_before_is_offered_before_it_is_computed(make_worker, greedy) -> None:
    source = make_worker("llama", max_num_seqs=1)
    prompt = make_prompt(20)
    for name in ("0", "1"):
        source.core.add_request(name, SequenceInput(prompt, greedy(5), handoff=RemoteDecode()))
    (told,) = source.core.step()
    assert (told.request_id, told.token_ids, source.num_used) == ("0", (), 0)
    assert [each.block_ids_per_group for each in source.notes.chunks] == [((),)]
    source.run()
    assert [each.remote_request_id for each in source.outputs["0"]] == [told.remote_request_id]
    first, last = source.outputs["1"]
    assert (first.token_ids, first.remote_request_id) == ((), last.remote_request_id)


def test_a_prompt_that_is_offered_and_waits_for_room_outlives_the_preemption_of_another(make_worker, greedy) -> None:
    source = make_worker("llama", num_blocks=13, max_model_len=48, max_num_seqs=3)
    for name in ("older", "younger"):
        source.core.add_request(name, SequenceInput(make_prompt(20, len(name)), greedy(12)))
        source.core.step()
    source.core.add_request("0", SequenceInput(make_prompt(30), greedy(5), handoff=RemoteDecode()))
    source.run()
    assert source.core.statistics().scheduler.num_preemptions
    assert source.notes.withdrawn == []
    assert source.outputs["0"][0].remote_request_id == source.outputs["0"][-1].remote_request_id


@pytest.mark.parametrize("end", ["withdrawn", "aborted", "failed", "preempted"])
def test_a_prompt_that_ends_amid_its_chunks_is_withdrawn_and_its_blocks_stay_until_nobody_reads_them(
    end: str, make_worker, greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_worker("llama", num_blocks=20, max_model_len=80, max_num_batched_tokens=16, max_num_seqs=2)
    if end == "preempted":
        source.core.add_request("older", SequenceInput(make_prompt(30, 1), greedy(20)))
        source.core.step()
    source.core.add_request("0", SequenceInput(make_prompt(60), greedy(5), handoff=RemoteDecode()))
    (told,) = source.core.step()
    name = told.remote_request_id
    source.core.step()
    match end:
        case "withdrawn":
            source.core.handoffs.withdraw(name)
        case "aborted":
            source.core.abort("0")
            source.core.handoffs.withdraw(name)  # as whoever lets it be aborted does
        case "failed":
            monkeypatch.setattr(source.core._runner, "forward", Mock(side_effect=RuntimeError("lost")))
            assert source.core.step()[-1].error == "the engine failed: lost"
        case "preempted":
            for _ in range(6):
                source.core.step()
    assert source.notes.withdrawn == [name]
    check_engine(source.core)
    assert source.num_used > 0
    source.core.on_report(OfferReleased(name, False))
    source.run()
    assert [each.error for each in source.outputs.get("0", [])] in (
        [],
        ["kv transfer failed: nobody fetches the prompt"],
    )
    assert "0" not in source.core._requests
    assert source.num_used == 0


def test_each_group_is_given_what_it_lacks_itself(make_worker, greedy) -> None:
    source, target, alone = (make_worker("gemma3") for _ in range(3))
    prompt = make_prompt(30)
    full = next(pool.group.group_id for pool in target.core.kv_cache.pools if pool.group.window is FULL)
    for name in ("0", "1"):
        alone.core.add_request(name, SequenceInput(prompt, greedy(12)))
        remote = prefill(source, name, prompt, greedy(12))
        target.core.add_request(name, SequenceInput(prompt, greedy(12), handoff=remote))
        target.run()
        wanted = target.notes.wanted[-1]
        copy(source, target, wanted)
        target.core.on_report(FetchCompleted(name, source.notes.offered[-1].first_token_id))
        target.run()
        alone.run()
        assert target.tokens(name) == alone.tokens(name)
        assert target.outputs[name][-1].num_cached_tokens == 0
        for pool in target.core.kv_cache.pools:  # windows are forgotten before what full attention needs
            if pool.group.group_id != full:
                pool.forget_free()
    missing = [sum(block_id != ABSENT for block_id in ids) for ids in wanted.block_ids_per_group]
    whole = [sum(block_id != ABSENT for block_id in ids) for ids in source.notes.offered[-1].block_ids_per_group]
    assert missing == [1 if group_id == full else count for group_id, count in enumerate(whole)], (
        "all but the last block"
    )


def test_random_tokens_are_those_of_one_worker(make_worker, greedy) -> None:
    source, target, alone = (make_worker("gemma3") for _ in range(3))
    prompt, params = make_prompt(30), greedy(12, temperature=1.0, seed=7)
    alone.core.add_request("0", SequenceInput(prompt, params))
    alone.run()
    target.core.add_request("0", SequenceInput(prompt, params, handoff=prefill(source, "0", prompt, params)))
    target.run()
    copy(source, target, target.notes.wanted[0])
    target.core.on_report(FetchCompleted("0", source.notes.offered[-1].first_token_id))
    target.run()
    assert target.tokens("0") == alone.tokens("0")


def test_a_held_prompt_keeps_its_blocks_until_released(make_worker, greedy) -> None:
    source = make_worker("gemma3")
    remote = prefill(source, "0", make_prompt(30), greedy(5))
    assert source.core.statistics().handoffs.num_held == 1
    assert source.num_used > 0
    check_engine(source.core)
    source.core.on_report(OfferReleased(remote.remote_request_id, True))
    assert source.num_used == 0
    assert source.core.statistics().handoffs.num_held == 0


def test_a_withdrawn_prompt_keeps_its_blocks_until_nobody_reads_them(make_worker, greedy) -> None:
    source = make_worker("gemma3")
    remote = prefill(source, "0", make_prompt(30), greedy(5))
    source.core.handoffs.withdraw("another")
    source.core.handoffs.withdraw(remote.remote_request_id)
    assert source.notes.withdrawn == [remote.remote_request_id]
    assert source.num_used > 0
    source.core.on_report(OfferReleased(remote.remote_request_id, False))
    assert source.num_used == 0
    source.core.handoffs.withdraw(remote.remote_request_id)
    assert source.notes.withdrawn == [remote.remote_request_id]


def test_prompts_beyond_the_limit_are_not_held(make_worker, greedy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "_MAX_HELD", 1)
    source = make_worker("gemma3")
    remote = prefill(source, "0", make_prompt(30), greedy(5))
    source.core.add_request("1", SequenceInput(make_prompt(30, 1), greedy(5), handoff=RemoteDecode()))
    source.run()
    assert source.outputs["1"][-1].error == "kv transfer failed: too many prompts are held"
    source.core.on_report(OfferReleased(remote.remote_request_id, True))
    assert source.num_used == 0


@pytest.mark.parametrize("is_released_first", [False, True])
def test_a_failed_fetch_is_computed_here_while_its_blocks_stay_out_of_use(
    is_released_first: bool, make_worker, greedy
) -> None:
    target, alone = make_worker("gemma3"), make_worker("gemma3")
    prompt = make_prompt(31)
    alone.core.add_request("0", SequenceInput(prompt, greedy(9)))
    alone.run()
    target.core.add_request("0", SequenceInput(prompt, greedy(9), handoff=RemotePrefill(("tcp://x:1",), "gone", 31)))
    target.run()
    reserved = set(target.notes.wanted[0].block_ids_per_group[0])
    target.core.on_report(FetchFailed("0", "the peer is gone"))
    if is_released_first:
        target.core.on_report(FetchReleased("0"))
    assert target.core.has_work
    target.core.step()
    held = {each for table in target.core._requests["0"].blocks.tables[:1] for each in table.held()}
    assert is_released_first or not held & reserved
    target.run()
    if not is_released_first:
        assert target.core.statistics().handoffs.num_abandoned == 1
        assert target.num_used > 0
        target.core.on_report(FetchReleased("0"))
    assert target.core._requests == {}
    assert target.num_used == 0
    assert target.core.statistics().handoffs.num_fallbacks == 1


def test_a_failed_fetch_ends_the_request_where_no_fallback_is_allowed(make_worker, greedy) -> None:
    target = make_worker("gemma3", is_fallback_allowed=False)
    remote = RemotePrefill(("tcp://x:1",), "gone", 31)
    target.core.add_request("0", SequenceInput(make_prompt(31), greedy(9), handoff=remote))
    target.run()
    target.core.on_report(FetchFailed("0", "unknown_request"))
    target.core.on_report(FetchReleased("0"))
    target.run()
    assert target.outputs["0"][-1].error == "kv transfer failed: unknown_request"
    assert target.num_used == 0


@pytest.mark.parametrize("ending", ["completed", "failed"])
def test_an_aborted_fetch_frees_its_blocks_when_the_transfer_has_ended(ending: str, make_worker, greedy) -> None:
    target = make_worker("gemma3")
    remote = RemotePrefill(("tcp://x:1",), "id", 31)
    target.core.add_request("0", SequenceInput(make_prompt(31), greedy(9), handoff=remote))
    target.run()
    target.core.abort("0")
    check_engine(target.core)
    assert target.notes.cancelled == ["0"]
    assert target.num_used > 0, "a late write could land in them"
    if ending == "completed":
        target.core.on_report(FetchCompleted("0", 300))
    else:
        target.core.on_report(FetchFailed("0", "cancelled"))
        target.core.on_report(FetchReleased("0"))
    target.run()
    assert target.num_used == 0
    assert target.outputs == {}


def test_prompts_wait_for_room_and_the_waiting_one_can_be_aborted(make_worker, greedy) -> None:
    target = make_worker("gemma3", max_num_seqs=2)
    for i in range(4):
        remote = RemotePrefill(("tcp://x:1",), f"id{i}", 20)
        target.core.add_request(str(i), SequenceInput(make_prompt(20, i), greedy(3), handoff=remote))
    target.run()
    assert [wanted.request_id for wanted in target.notes.wanted] == ["0", "1"]
    assert not target.core.has_work, "the engine would spin"
    target.core.abort("2")
    check_engine(target.core)
    target.core.on_report(FetchFailed("0", "gone"))
    target.core.on_report(FetchReleased("0"))
    target.run()
    assert [wanted.request_id for wanted in target.notes.wanted] == ["0", "1", "3"]
    for request_id in ("1", "3"):
        target.core.on_report(FetchCompleted(request_id, 300))
    target.run()
    assert target.num_used == 0


def test_held_prompts_that_fill_the_memory_stop_the_engine_until_one_is_released(make_worker, greedy) -> None:
    source = make_worker("llama", num_blocks=24, max_model_len=96, max_num_batched_tokens=96)
    remote = prefill(source, "0", make_prompt(60), greedy(5))
    source.core.add_request("1", SequenceInput(make_prompt(60, 1), greedy(5)))
    source.run()
    assert "1" not in source.outputs
    source.core.on_report(OfferReleased(remote.remote_request_id, True))
    source.run()
    assert source.outputs["1"][-1].finish_reason == "length"


def test_log_probabilities_make_the_prompt_be_computed_here(make_worker, greedy) -> None:
    target = make_worker("gemma3")
    remote = RemotePrefill(("tcp://x:1",), "id", 31)
    target.core.add_request("0", SequenceInput(make_prompt(31), greedy(3, logprobs=True), handoff=remote))
    target.run()
    assert target.notes.wanted == []
    assert len(target.outputs["0"]) == 3


@pytest.mark.parametrize("num_tokens", [32, 100])
def test_a_handoff_that_does_not_fit_the_prompt_is_refused(num_tokens: int, make_worker, greedy) -> None:
    remote = RemotePrefill(("tcp://x:1",), "id", num_tokens)
    with pytest.raises(InvalidValueError, match="num_tokens"):
        make_worker("gemma3").core.check(SequenceInput(make_prompt(31), greedy(3), handoff=remote))


def test_a_prompt_whose_first_token_is_not_of_the_vocabulary_is_computed_here(make_worker, greedy) -> None:
    target = make_worker("gemma3")
    remote = RemotePrefill(("tcp://x:1",), "id", 31)
    target.core.add_request("0", SequenceInput(make_prompt(31), greedy(3), handoff=remote))
    target.run()
    target.core.on_report(FetchCompleted("0", 512))
    target.run()
    assert (target.core.statistics().handoffs.num_fallbacks, len(target.tokens("0"))) == (1, 3)
    assert target.num_used == 0


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_a_name_that_no_message_can_carry_is_refused(name: str, make_worker, greedy) -> None:
    remote = RemotePrefill(("tcp://x:1",), name, 31)
    with pytest.raises(InvalidValueError, match="remote_request_id"):
        make_worker("gemma3").core.check(SequenceInput(make_prompt(31), greedy(3), handoff=remote))


@pytest.mark.parametrize(
    "endpoints",
    [
        (),
        tuple(f"tcp://a:{port}" for port in range(1, 66)),
        ("tcp://a:1", "tcp://a:1"),
        *(("tcp://a:1", bad) for bad in ("ipc://x", "tcp://a", "tcp://a:0", "tcp://a:99999", "tcp://a:1;tcp://b:1")),
    ],
)
def test_what_cannot_be_the_ranks_of_a_worker_is_refused(endpoints: tuple[str, ...], make_worker, greedy) -> None:
    remote = RemotePrefill(endpoints, "id", 31)
    with pytest.raises(InvalidValueError, match=r"kv_transfer_params\.remote_endpoints"):
        make_worker("gemma3").core.check(SequenceInput(make_prompt(31), greedy(3), handoff=remote))


def test_an_engine_without_transfers_refuses_handoffs(make_core, greedy) -> None:
    with pytest.raises(InvalidValueError, match="kv_transfer_params"):
        make_core("gemma3").check(SequenceInput(make_prompt(31), greedy(3), handoff=RemoteDecode()))


def test_each_part_of_a_request_is_timed_where_it_is_done(make_worker, greedy) -> None:
    source, target = make_worker("qwen3"), make_worker("qwen3")
    prompt, times = make_prompt(22), {name: RequestTimes() for name in ("P", "D", "failed", "aborted")}
    source.core.add_request("P", SequenceInput(prompt, greedy(9), handoff=RemoteDecode()), times=times["P"])
    source.run()
    offered = source.notes.offered[-1].remote_request_id
    held = RemotePrefill(("tcp://here:1",), offered, len(prompt))
    for name in ("D", "failed", "aborted"):
        target.core.add_request(name, SequenceInput(prompt, greedy(9), handoff=held), times=times[name])
        target.run()
        assert times[name].fetching_s is not None
        assert times[name].fetched_s is times[name].ended_s is None
    target.core.on_report(FetchCompleted("D", 300))
    target.core.on_report(FetchFailed("failed", "gone"))
    target.core.abort("aborted")
    target.run()

    def steps(name: str) -> list[str]:
        reached = ("queued_s", "fetching_s", "fetched_s", "scheduled_s", "first_token_s", "ended_s")
        at_s = {step: getattr(times[name], step) for step in reached if getattr(times[name], step) is not None}
        assert list(at_s.values()) == sorted(at_s.values())
        return list(at_s)

    assert steps("P") == ["queued_s", "scheduled_s", "first_token_s", "ended_s"]
    assert (times["P"].remote_request_id, times["P"].num_output_tokens) == (offered, 1)
    assert steps("D") == ["queued_s", "fetching_s", "fetched_s", "first_token_s", "ended_s"]
    assert (times["D"].num_output_tokens, times["D"].finish_reason, times["D"].fetch_error) == (9, "length", None)
    assert steps("failed") == ["queued_s", "fetching_s", "fetched_s", "scheduled_s", "first_token_s", "ended_s"]
    assert times["failed"].fetch_error == "gone"
    assert steps("aborted") == ["queued_s", "fetching_s", "ended_s"]
    assert times["aborted"].finish_reason == "abort"


def add_fetched(worker: Worker, request_id: str, num_tokens: int, params: SamplingParams) -> None:
    remote = RemotePrefill(("tcp://here:1",), "held", num_tokens)
    worker.core.add_request(request_id, SequenceInput(make_prompt(num_tokens, 9), params, handoff=remote))


def test_a_prompt_is_fetched_into_an_ended_requests_blocks_once_the_step_ahead_is_computed(
    make_late_worker, greedy
) -> None:
    worker = make_late_worker("llama", num_blocks=9, max_model_len=36)
    worker.core.add_request("0", SequenceInput(make_prompt(18), greedy(9)))
    worker.run()
    *expected, stop = worker.tokens("0")[:2]
    worker.core.add_request("1", SequenceInput(make_prompt(18), greedy(9, stop_token_ids=[stop])))
    worker.outputs["1"] = worker.core.step()
    add_fetched(worker, "fetched", 24, greedy(2))
    while "1" in worker.core._requests:
        assert worker.notes.wanted == []
        for output in worker.core.step():
            worker.outputs["1"].append(output)
    assert worker.core._ahead is not None, "a step too many"
    worker.run()
    assert worker.tokens("1") == [*expected, stop]
    assert len(worker.notes.wanted) == 1


@pytest.mark.parametrize("end", ["aborted", "failed"])
def test_a_prompt_is_fetched_into_the_blocks_of_another_that_ended_once_its_chunk_is_computed(
    end: str, make_late_worker, greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_late_worker("llama", num_blocks=9, max_model_len=36, max_num_batched_tokens=8, max_num_seqs=2)
    worker.core.add_request("0", SequenceInput(make_prompt(30), greedy(5)))
    if end == "aborted":
        assert worker.core.step() == []
        worker.core.abort("0")
    else:
        with monkeypatch.context() as patched:
            patched.setattr("kvist.engine.core.draw", Mock(side_effect=RuntimeError("out of memory")))
            assert worker.core.step()[0].error == "the engine failed: out of memory"
    add_fetched(worker, "fetched", 30, greedy(2))
    worker.run()
    assert len(worker.notes.wanted) == 1


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_cached_prefix_is_held_for_others_once_it_is_computed(is_ahead: bool, make_late_worker, greedy) -> None:
    worker = make_late_worker("llama", max_num_batched_tokens=16, max_num_seqs=2)
    prompt = make_prompt(30)
    if is_ahead:
        worker.core.add_request("0", SequenceInput(make_prompt(9, 1), greedy(9)))
        worker.core.step()
    worker.core.add_request("1", SequenceInput(prompt, greedy(5)))
    worker.core.step()
    assert (worker.core._ahead is not None) == is_ahead
    worker.core.add_request("2", SequenceInput(prompt, GREEDY_ONCE, handoff=RemoteDecode(30)))
    worker.run()
    assert len(worker.tokens("1")) == 5
    assert len(worker.notes.offered) == 1


@pytest.mark.parametrize("num_tokens", [8, 20])
def test_a_chunk_of_a_prompt_is_offered_once_it_is_computed_unless_its_request_was_aborted(
    num_tokens: int, make_late_worker, greedy
) -> None:
    worker = make_late_worker("llama", max_num_batched_tokens=8, max_num_seqs=2)
    worker.core.add_request("0", SequenceInput(make_prompt(5, 1), greedy(9)))
    worker.core.step()
    worker.core.add_request("1", SequenceInput(make_prompt(num_tokens), greedy(5), handoff=RemoteDecode()))
    (told,) = worker.core.step()
    worker.core.step()
    assert worker.core._ahead is not None
    if num_tokens == 8:
        worker.run()
        assert worker.outputs["1"][-1].finish_reason == "length"
    else:
        worker.core.abort("1")
        worker.core.handoffs.withdraw(told.remote_request_id)
        worker.core.on_report(OfferReleased(told.remote_request_id, False))
        worker.run()
        assert "1" not in worker.outputs
    assert len(worker.outputs["0"]) >= 7
