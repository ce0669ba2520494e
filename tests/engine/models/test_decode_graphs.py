"""Without a CUDA device nothing is captured: the work simply runs again, on the buffers that a graph would read."""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext
from unittest.mock import MagicMock

import pytest
import torch

from kvist.engine import decode_graphs
from kvist.engine.decode_graphs import DecodeGraphs, cuda_graph_capture
from kvist.engine.runner import Runner
from kvist.kvcache import peak_num_blocks


@pytest.mark.parametrize("name", ["gemma3", "qwen3-moe"])
def test_padded_steps_on_static_buffers_give_the_logits_of_eager_ones(name: str, harness, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("a step waits for the whole device"))
    eager, padded = harness(name), harness(name)
    captured: list[int] = []

    def capture(compute):
        captured.append(len(compute()))
        return compute

    widths = [peak_num_blocks(group, 4, 512, 1) for group in padded.plan.groups]
    with torch.inference_mode():
        graphs = DecodeGraphs(padded.model, padded.plan, padded.tensors, widths, 11, capture)
    assert captured == [11, 8, 4, 2, 1]
    padded.runner = Runner(padded.model, padded.plan, padded.tensors, 4, graphs)

    rng = random.Random(1)
    for num_seqs in (5, 3, 1):
        prompts = [[rng.randrange(3, 512) for _ in range(rng.randrange(30, 60))] for _ in range(num_seqs)]
        pairs = []
        for model in (eager, padded):
            requests = [model.open(prompt) for prompt in prompts]
            model.step(*((request, len(request.token_ids) - 25) for request in requests))
            pairs.append((model, requests))
        for _ in range(25):
            expected, got = (model.step(*((each, 1) for each in requests)) for model, requests in pairs)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        for model, requests in pairs:
            for request in requests:
                model.close(request)


def test_graphs_of_all_sizes_read_the_same_memory_which_stays_theirs(harness) -> None:
    paged, batches = harness("gemma3"), []

    def capture(compute):
        batches.append(*compute.args)
        return compute

    widths = [peak_num_blocks(group, 4, 512, 1) for group in paged.plan.groups]
    DecodeGraphs(paged.model, paged.plan, paged.tensors, widths, 4, capture)
    assert len(batches) == 3
    for batch in batches[1:]:
        for name in ("input_ids", "positions", "seq_lens", "prefill_start_loc", "logit_rows"):
            assert getattr(batch, name).data_ptr() == getattr(batches[0], name).data_ptr(), name


def test_all_graphs_are_captured_on_the_models_device_in_one_stream_and_pool(monkeypatch) -> None:
    devices: list[str] = []
    captures: list[tuple[str, object, object]] = []

    @contextmanager
    def on(device):
        devices.append(str(device))
        yield
        devices.pop()

    def graph(_, *, pool, stream):
        captures.append((devices[-1], pool, stream))
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock(side_effect=lambda: MagicMock()))
    capture = cuda_graph_capture(torch.device("cuda:1"))
    results = [capture(lambda value=value: torch.tensor(value))() for value in (3, 4)]
    assert [int(result) for result in results] == [3, 4]
    assert captures[0] == captures[1]
    assert captures[0][0] == "cuda:1"


def test_batches_larger_than_any_graph_run_as_they_are(harness, monkeypatch) -> None:
    monkeypatch.setattr(decode_graphs, "MAX_CAPTURED_SEQS", 2)
    paged = harness("gemma3")
    widths = [peak_num_blocks(group, 4, 512, 1) for group in paged.plan.groups]
    replayed = []

    def capture(compute):
        def replay():
            replayed.append(1)
            return compute()

        return replay

    graphs = DecodeGraphs(paged.model, paged.plan, paged.tensors, widths, 64, capture)
    paged.runner = Runner(paged.model, paged.plan, paged.tensors, 4, graphs)
    requests = [paged.open([5, 6, 7 + i]) for i in range(3)]
    paged.step(*((request, 2) for request in requests))
    assert not replayed
    assert len(paged.step(*((request, 1) for request in requests))) == 3
    assert not replayed
    fourth = paged.open([8, 9])
    paged.step((fourth, 1))
    assert replayed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("others", ["not captured", "not compiled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_graphs_generate_what_launched_kernels_do(
    dtype: str, others: str, make_core, generate, greedy, tokens_of, caplog
) -> None:
    if (dtype, others) == ("bfloat16", "not compiled"):
        pytest.skip("compiled layers round less often")
    rng = random.Random(2)
    requests = [([rng.randrange(3, 512) for _ in range(20 + 9 * i)], greedy(20 + 7 * i)) for i in range(5)]
    answers = []
    for is_other in (True, False):
        enforce_eager = is_other and others == "not compiled"
        core = make_core("gemma3", device="cuda", dtype=dtype, enforce_eager=enforce_eager, max_num_seqs=6)
        if is_other:
            core._runner.graphs = None
        torch.empty(1 << 24, device="cuda").fill_(float("nan"))  # what graphs must not read
        outputs = generate(core, requests)
        answers.append([tokens_of(outputs[str(i)]) for i in range(5)])
    assert answers[0] == answers[1]
    assert "kernel compiled while serving" not in caplog.text
