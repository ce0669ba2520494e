"""What a GPU would compile, by Triton's own account, without one: launches get as far as its cache and are recorded."""

from __future__ import annotations

import random
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kvist.engine.models import transformer
from kvist.kernels._triton import DeviceFacts
from kvist.kvcache import peak_num_blocks

MAX_STEP = 64


@pytest.fixture
def _recorded_launches(monkeypatch) -> None:
    """Triton finds an H100 (of no number: its caches stay apart), attention gives zeros, and nothing is compiled."""
    compiled: set[str] = set()
    target = {"target": GPUTarget("cuda", 90, 32), "device": -1, "stream": 0}
    fakes = {f"get_current_{name}": lambda *_, value=value: value for name, value in target.items()}
    monkeypatch.setattr(driver, "_active", SimpleNamespace(**fakes))
    attention, write = (import_module(f"kvist.kernels.{name}") for name in ("paged_attention", "write_kv"))
    for module in (attention, write):
        monkeypatch.setattr(module, "is_launched", lambda _: True)
    monkeypatch.setattr(attention, "device_facts", lambda _: DeviceFacts(132, 90))

    def hook(*, key: str, fn, compile, **_) -> bool:  # noqa: A002
        if fn.name + key not in compiled:
            compiled.add(fn.name + key)
            knobs.runtime.jit_post_compile_hook(fn=fn, compile=compile)
        return True

    def attend(*args, out: torch.Tensor, **options) -> None:
        attention.paged_attention(*args, out=out, **options)
        out.zero_()

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", hook)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    monkeypatch.setattr(transformer, "paged_attention", attend)


@pytest.mark.usefixtures("_recorded_launches")
# Of each kind of layer decodes and prefills, whole and split; eight keys, gemma3's window, are never split.
@pytest.mark.parametrize(("name", "num_attention"), [("llama", 4), ("gemma3", 6)])
def test_what_random_steps_launch_was_compiled_before(name: str, num_attention: int, harness, caplog) -> None:
    paged = harness(name)
    with caplog.at_level("INFO", "kvist"):
        paged.runner.warm_up([peak_num_blocks(group, 4, 512, MAX_STEP) for group in paged.plan.groups])
    assert f"kernels compiled num={num_attention + 2} " in caplog.text
    assert caplog.text.count("paged_attention_kernel ") == num_attention
    assert caplog.text.count(" TOKENS=1 ") == num_attention // 2

    rng = random.Random(name)
    running = []
    for _ in range(60):
        if sum(len(each.token_ids) for each in running) < 350 and rng.random() < 0.5:
            prompt = [rng.randrange(3, 500) for _ in range(rng.choice([1, 16, 17, 63, 200]))]
            running.append(paged.open(prompt, has_scratch=rng.random() < 0.5))
        left = [(each, len(each.token_ids) - each.num_computed_tokens) for each in running]
        chunks = [(each, min(count, rng.choice([1, 1, 2, 16, MAX_STEP]))) for each, count in left if count]
        if chunks:
            paged.step(*chunks)
        for each, count in left:
            if not count:
                running.remove(each)
                paged.close(each)
    assert "compiled while serving" not in caplog.text


def test_warming_up_leaves_the_cache_as_it_was(family: str, harness) -> None:
    paged = harness(family)
    for pool in paged.tensors.pools:
        pool.fill_(1.0)
    paged.runner.warm_up([peak_num_blocks(group, 4, 512, MAX_STEP) for group in paged.plan.groups])
    assert all((pool == 1.0).all() for pool in paged.tensors.pools)
