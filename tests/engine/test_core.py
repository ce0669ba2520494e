from __future__ import annotations

import random

import pytest
import torch
from late_device import late_devices
from memory_invariants import check_engine

from kvist.engine.core import EngineCore
from kvist.engine.request import SequenceInput
from kvist.engine.runner import Runner
from kvist.engine.sampler import draw
from kvist.errors import InvalidValueError
from kvist.openai.requests import SamplingParams


def make_prompt(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(count)]


class Words:
    """A detokenizer that writes every token as a letter."""

    def step(self, token_id: int) -> str:
        return chr(ord("a") + token_id % 26)

    def flush(self) -> str:
        return ""


ROOMY = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "has_prefix_cache": False}
VARIANTS = {
    "prefix cache": ROOMY | {"has_prefix_cache": True},
    "one at a time": ROOMY | {"max_num_seqs": 1},
    "chunks of seven": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "tiny pools": {"max_model_len": 96, "num_blocks": 26, "max_num_batched_tokens": 48, "max_num_seqs": 8},
    "blocks of 16": ROOMY | {"block_size": 16},
    "scratch slots": ROOMY | {"has_swa_scratch": True, "has_prefix_cache": True},
    "scratch slots in chunks": {"max_num_batched_tokens": 23, "max_num_seqs": 5, "has_swa_scratch": True},
    "scratch slots in tiny pools": {
        "max_model_len": 96,
        "num_blocks": 26,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 8,
        "has_swa_scratch": True,
    },
}


@pytest.fixture(scope="module")
def expected_tokens() -> dict[tuple[str, int], list[list[int]]]:
    """Each model's answers, one request at a time in an engine with nothing but room."""
    return {}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["qwen3-sliding", "gemma3"])
def test_how_requests_are_scheduled_never_changes_their_tokens(
    name: str, variant: str, seed: int, make_core, generate, greedy, tokens_of, expected_tokens
) -> None:
    rng = random.Random(seed)
    stem = make_prompt(24, seed)
    prompts = [stem[: rng.randrange(25)] + make_prompt(rng.randrange(1, 30), seed=10 * seed + i) for i in range(6)]
    requests = [(prompt, greedy(rng.randrange(1, 30))) for prompt in prompts]
    if (name, seed) not in expected_tokens:
        alone = [generate(make_core(name, **ROOMY), [request])["0"] for request in requests]
        expected_tokens[name, seed] = [tokens_of(outputs) for outputs in alone]
    core = make_core(name, **VARIANTS[variant])
    outputs = generate(core, requests)
    assert [tokens_of(outputs[str(i)]) for i in range(6)] == expected_tokens[name, seed]
    again = generate(core, requests)
    assert [tokens_of(again[str(i)]) for i in range(6)] == expected_tokens[name, seed]
    if "tiny pools" in variant:
        assert core.statistics().scheduler.num_preemptions > 0


def test_a_shared_prefix_is_reported_as_cached_and_answers_alike(make_core, generate, greedy, tokens_of) -> None:
    core = make_core("gemma3")
    prompt = make_prompt(40)
    first = generate(core, [(prompt, greedy(10))])["0"]
    second = generate(core, [(prompt, greedy(10))])["0"]
    assert first[-1].num_cached_tokens == 0
    assert second[-1].num_cached_tokens == 36
    assert tokens_of(first) == tokens_of(second)
    core.kv_cache.flush()
    assert generate(core, [(prompt, greedy(1))])["0"][-1].num_cached_tokens == 0


def test_requests_that_arrive_together_compute_a_shared_prefix_once(make_core, generate, greedy, tokens_of) -> None:
    core = make_core("gemma3")
    stem = make_prompt(40)
    outputs = generate(core, [([*stem, 5 + i], greedy(4)) for i in range(3)])
    assert [outputs[str(i)][-1].num_cached_tokens for i in range(3)] == [0, 40, 40]
    alone = generate(make_core("gemma3", has_prefix_cache=False), [([*stem, 5 + i], greedy(4)) for i in range(3)])
    assert [tokens_of(each) for each in outputs.values()] == [tokens_of(each) for each in alone.values()]


@pytest.mark.parametrize("name", ["qwen3-sliding", "gemma3"])
def test_a_system_prompt_stays_cached_although_a_decode_slid_past_it(name: str, make_core, generate, greedy) -> None:
    window, block_size = 8, 4
    core = make_core(name, max_num_batched_tokens=16, max_num_seqs=4)
    system = make_prompt(4 * window)
    generate(core, [([*system, 5, 6, 7], greedy(2 * window))])
    outputs = generate(core, [([*system, 8, 9, 10], greedy(4))])
    assert outputs["0"][-1].num_cached_tokens >= len(system) - 2 * block_size


def test_scratch_slots_hold_what_a_prefill_makes_stale_and_are_free_after_it(
    make_core, generate, greedy, tokens_of, monkeypatch
) -> None:
    prompt = make_prompt(256)
    plain = generate(make_core("gemma3"), [(prompt, greedy(5))])["0"]
    core = make_core("gemma3", has_swa_scratch=True)
    forward, in_use = core._runner.forward, []

    def watched(*step):
        in_use.append([(pool.num_used, pool.num_scratch) for pool in core.statistics().kv_cache.pools])
        return forward(*step)

    monkeypatch.setattr(core._runner, "forward", watched)
    outputs = generate(core, [(prompt, greedy(5))])["0"]
    assert tokens_of(outputs) == tokens_of(plain)
    # 62 of the 64 sliding blocks are stale at the end of the step; a slot of 5 layers holds 5 of them.
    assert in_use[0] == [(64, 0), (2 + 13, 13)]
    assert all(num_scratch == 0 for step in in_use[1:] for _, num_scratch in step)
    longer = generate(core, [([*prompt, 7], greedy(5))])["0"]
    assert longer[-1].num_cached_tokens == 256, "the last window is no scratch: what follows the prompt finds it"
    shorter = generate(core, [(prompt[:200], greedy(5))])["0"]
    assert shorter[-1].num_cached_tokens == 0


def test_a_request_can_keep_out_of_scratch_slots_so_that_all_of_it_is_reused(make_core, greedy) -> None:
    core = make_core("gemma3", has_swa_scratch=True)
    cached = []
    for request_id, swa_scratch in (("a", True), ("b", False)):
        prompt = make_prompt(60, seed=ord(request_id))
        core.add_request(request_id, SequenceInput(prompt, greedy(1), swa_scratch=swa_scratch))
        core.step()
        core.add_request("again", SequenceInput([*prompt[:40], 7], greedy(1)))
        (output,) = core.step()
        cached.append(output.num_cached_tokens)
    assert cached == [0, 40]


def test_scratch_slots_that_the_engine_lacks_are_refused(make_core, greedy) -> None:
    core = make_core("gemma3")
    with pytest.raises(InvalidValueError, match="swa_scratch: got True, expected false: this engine was started"):
        core.add_request("r", SequenceInput([3], greedy(1), swa_scratch=True))
    core.add_request("r", SequenceInput([3], greedy(1), swa_scratch=False))
    assert core.step()


def test_different_salts_share_nothing(make_core, greedy) -> None:
    core = make_core("qwen3")
    prompt = make_prompt(20)
    cached = []
    for i, salt in enumerate((None, "a", "a", "b")):
        core.add_request(str(i), SequenceInput(prompt, greedy(1), cache_salt=salt))
        (output,) = core.step()
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 16, 0]


def test_an_aborted_request_gives_back_its_blocks_and_the_others_go_on(make_core, greedy) -> None:
    core: EngineCore = make_core("gemma3", max_num_batched_tokens=16, max_num_seqs=2)
    for i in range(4):
        core.add_request(str(i), SequenceInput(make_prompt(30, seed=i), greedy(5)))
    core.step()
    core.abort("0")
    core.abort("3")
    core.abort("3")
    core.abort("unknown")
    check_engine(core)
    finished = set()
    while core.has_work:
        finished |= {output.request_id for output in core.step() if output.is_last}
        check_engine(core)
    assert finished == {"1", "2"}
    assert all(pool.num_used == 0 for pool in core.statistics().kv_cache.pools)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("bad launch")])
def test_a_failed_step_ends_its_requests_and_not_the_engine(make_core, greedy, monkeypatch, error) -> None:
    core: EngineCore = make_core("qwen3", max_num_seqs=2, max_num_batched_tokens=64)
    for i in range(3):
        core.add_request(str(i), SequenceInput(make_prompt(10, seed=i), greedy(3)))

    def fail(*_: object) -> torch.Tensor:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "forward", fail)
        outputs = core.step()
    assert [(o.request_id, o.error) for o in outputs] == [("0", f"the engine failed: {error}"), ("1", outputs[1].error)]
    check_engine(core)
    assert core.statistics().num_failed_steps == 1
    assert not any(pool.num_cached for pool in core.statistics().kv_cache.pools), "nothing was computed"
    left = [output for _ in range(3) for output in core.step()]
    assert left[-1].request_id == "2"
    assert left[-1].finish_reason == "length"


def test_end_tokens_stop_unless_ignored_or_too_early(make_core, generate, greedy, tokens_of) -> None:
    core = make_core("qwen3")
    prompt = make_prompt(12)
    free = tokens_of(generate(core, [(prompt, greedy(12))])["0"])
    stop = free[4]
    first_stop = free.index(stop)
    outputs = generate(core, [(prompt, greedy(12, stop_token_ids=[stop]))])["0"]
    assert tokens_of(outputs) == free[: first_stop + 1]
    assert outputs[-1].finish_reason == "stop"
    late = generate(core, [(prompt, greedy(12, stop_token_ids=[stop, 10**6], min_tokens=9))])["0"]
    assert stop not in tokens_of(late)[:9]
    assert len(tokens_of(late)) >= 9


def test_the_checkpoints_end_token_stops_unless_ignored(make_core, greedy, generate, tokens_of, monkeypatch) -> None:
    core = make_core("qwen3")
    monkeypatch.setattr("kvist.engine.core.draw", lambda _, requests: torch.ones(len(requests), dtype=torch.int64))
    (output,) = generate(core, [([5, 6], greedy(4, ignore_eos=False))])["0"]
    assert (output.token_ids, output.finish_reason) == ((1,), "stop")
    ignored = generate(core, [([5, 6], greedy(4))])["0"]
    assert tokens_of(ignored) == [1, 1, 1, 1]
    assert ignored[-1].finish_reason == "length"


class Lost(torch.Tensor):
    def tolist(self):
        raise RuntimeError("lost")


def test_a_device_that_fails_after_the_launch_of_two_steps_ends_their_requests_and_no_others(
    make_core, greedy, generate, tokens_of, monkeypatch
) -> None:
    core = make_core("qwen3")
    expected = tokens_of(generate(core, [(make_prompt(12), greedy(5))])["0"])
    monkeypatch.setattr(Runner, "can_wait", True)  # as on a GPU
    for i in range(2):
        core.add_request(f"lost {i}", SequenceInput(make_prompt(12 + i), greedy(5)))
    with monkeypatch.context() as patched:
        patched.setattr("kvist.engine.core.draw", lambda *step: draw(*step).as_subclass(Lost))
        outputs = core.step()
    assert core._ahead is None
    assert {output.request_id: output.error for output in outputs} == dict.fromkeys(
        ("lost 0", "lost 1"), "the engine failed: lost"
    )
    assert not core.has_work
    assert core.statistics().kv_cache.num_used == 0
    again = generate(core, [(make_prompt(12), greedy(5))])["0"]
    assert tokens_of(again) == expected
    assert again[-1].num_cached_tokens == 0, "what a failed step should have filled is not reused"


def test_a_steps_tokens_are_given_out_before_the_step_ahead_is_computed(make_core, greedy) -> None:
    core = make_core("qwen3")
    core.add_request("0", SequenceInput(make_prompt(12), greedy(5)))
    with late_devices() as devices:
        for num_ahead in (1, 1, 1, 1, 0):
            (output,) = core.step()
            assert len(output.token_ids) == 1
            assert len(devices(core._runner).steps) == num_ahead
    assert not core.has_work


def test_a_stop_string_ends_the_request_and_is_cut_off(make_core, greedy) -> None:
    core: EngineCore = make_core("qwen3")

    def run(request_id: str, **params: object) -> tuple[str, str | None, int]:
        core.add_request(request_id, SequenceInput(make_prompt(12), greedy(30, **params), Words()))
        outputs = []
        while core.has_work:
            outputs += core.step()
        return "".join(o.text for o in outputs), outputs[-1].finish_reason, len(outputs)

    free, reason, _ = run("free")
    assert (len(free), reason) == (30, "length")
    stop = free[10:12]
    at = free.index(stop)
    assert run("stop", stop=["@", stop]) == (free[:at], "stop", at + 2)
    assert run("kept", stop=stop, include_stop_str_in_output=True) == (free[: at + 2], "stop", at + 2)
    text, _, count = run("late", stop=stop, min_tokens=at + 2)
    assert count > at + 2
    assert text[: at + 2] == free[: at + 2]


def test_seeds_make_random_requests_repeatable_in_any_company(make_core, generate, tokens_of) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)
    prompt = make_prompt(20)
    alone = tokens_of(generate(make_core("gemma3"), [(prompt, params)])["0"])
    crowd = [(make_prompt(30, seed=i), SamplingParams(seed=i, max_tokens=20, ignore_eos=True)) for i in range(5)]
    tight = {"max_model_len": 96, "num_blocks": 26, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    core = make_core("gemma3", **tight)
    assert tokens_of(generate(core, [*crowd, (prompt, params)])["5"]) == alone
    assert core.statistics().scheduler.num_preemptions > 0


def test_log_probabilities_come_with_each_token(make_core, generate, greedy) -> None:
    outputs = generate(make_core("qwen3"), [(make_prompt(9), greedy(4, logprobs=3))])["0"]
    for output in outputs:
        (logprobs,) = output.logprobs
        assert logprobs.token.token_id == output.token_ids[0] == logprobs.top[0].token_id
        assert logprobs.token.logprob == pytest.approx(logprobs.top[0].logprob)
        assert len(logprobs.top) == 3


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "at least one token"),
        ([3] * 60, 5, "60 tokens and 5 to generate.*at most 64"),
        ([3] * 64, None, "64 tokens and 1 to generate.*at most 64"),
        ([3, 512], 1, "got 512, expected token ids below 512"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused(make_core, prompt, max_tokens, message) -> None:
    core = make_core("qwen3", max_model_len=64)
    with pytest.raises(InvalidValueError, match=message):
        core.add_request("r", SequenceInput(prompt, SamplingParams(max_tokens=max_tokens)))
    assert not core.has_work


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_nearly_the_same_probabilities(make_core, generate, greedy, dtype: str) -> None:
    request = (make_prompt(30), greedy(1, logprobs=5))
    exact, rough = (generate(make_core("gemma3", dtype=each), [request])["0"][0] for each in ("float32", dtype))
    assert rough.token_ids == exact.token_ids
    assert rough.logprobs[0].token.logprob == pytest.approx(exact.logprobs[0].token.logprob, abs=0.2)


def test_without_a_limit_a_request_fills_the_context(make_core, generate, tokens_of) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    outputs = generate(make_core("qwen3", max_model_len=32), [([3] * 20, params)])
    assert len(tokens_of(outputs["0"])) == 12


def test_a_bad_word_of_tokens_that_the_model_has_not_is_refused(make_core, greedy) -> None:
    wanted = SequenceInput([5], greedy(1), bad_words=((7, 99_999),))
    with pytest.raises(InvalidValueError, match="bad_words: got 99999, expected token ids below 512"):
        make_core().check(wanted)
