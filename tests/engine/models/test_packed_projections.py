"""On a GPU projections of the same input are one product, and layers are compiled."""

from __future__ import annotations

import gc
import weakref
from functools import partialmethod

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.utils import counters

from kvist.engine.models.projections import HandedLinear, PackedLinear, pack_projections
from kvist.engine.models.transformer import compile_layers


def block(*names: str, has_bias: bool = False) -> nn.Module:
    module = nn.Module()
    for i, name in enumerate(names):
        module.add_module(name, nn.Linear(8, 4 + i, bias=has_bias))
    return module.requires_grad_(False)


@pytest.mark.parametrize("has_bias", [False, True])
def test_one_product_computes_all_with_no_more_weights_than_before(has_bias: bool) -> None:
    module, x = block("q_proj", "k_proj", "v_proj", has_bias=has_bias), torch.randn(1, 5, 8)
    expected, size = [part(x) for part in module.children()], sum(each.numel() for each in module.parameters())
    pack_projections(module)
    assert sum(each.numel() for each in module.parameters()) == size
    assert [type(part) for part in module.children()] == [PackedLinear, HandedLinear, HandedLinear]
    for _ in range(2):
        torch.testing.assert_close([part(x) for part in module.children()], expected)


def test_nothing_is_kept_once_all_are_handed_over() -> None:
    module, x = block("gate_proj", "up_proj"), torch.randn(1, 5, 8)
    pack_projections(module)
    kept = [weakref.ref(part(x)) for part in module.children()] + [weakref.ref(x)]
    del x
    gc.collect()
    assert [each() for each in kept] == [None] * 3


def test_another_input_is_refused() -> None:
    module, x = block("gate_proj", "up_proj"), torch.randn(1, 5, 8)
    pack_projections(module)
    module.gate_proj(x)
    with pytest.raises(AssertionError):
        module.up_proj(x.clone())


def test_projections_of_different_dtypes_stay_apart() -> None:
    module = block("q_proj", "k_proj")
    module.k_proj.to(torch.bfloat16)
    pack_projections(module)
    assert {type(part) for part in module.children()} == {nn.Linear}


def test_a_projection_alone_stays_as_it_is() -> None:
    module = block("q_proj", "o_proj")
    pack_projections(module)
    assert {type(part) for part in module.children()} == {nn.Linear}


@pytest.fixture
def traceable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace layers as on a GPU, but run them as they were traced; loops that Numba compiles cannot be traced."""
    monkeypatch.setattr("kvist.kernels._triton._import_loops", lambda: None)
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    attend = transformers.AttentionInterface._global_mapping["kvist_paged"]
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "kvist_paged", attend)
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.usefixtures("traceable")
def test_layers_compile_to_no_more_graphs_than_unpacked_ones(harness, oracle) -> None:
    """Attention, which is not traced, splits a layer in two; the second layer and later steps compile nothing more."""
    family, tokens = "llama-tied-biased-llama3", torch.randint(3, 512, (40,)).tolist()

    def num_graphs(is_packed: bool) -> int:
        torch._dynamo.reset()
        counters.clear()
        model = harness(family)
        if is_packed:
            pack_projections(model.model.decoder)
        compile_layers(model.model.decoder)
        request = model.open(tokens)
        got = torch.cat([model.step((request, 30)), model.step((request, 7)), model.decode(request, 40)])
        torch.testing.assert_close(got, oracle(family, tokens), rtol=0, atol=1e-4)
        return counters["stats"]["unique_graphs"]

    assert 0 < num_graphs(is_packed=True) == num_graphs(is_packed=False)


@pytest.mark.usefixtures("traceable")
def test_fp8_layers_compile_to_as_many_graphs_as_others(fp8_checkpoint, harness, monkeypatch) -> None:
    tokens, logits, num_graphs = torch.randint(3, 512, (40,)).tolist(), [], []
    monkeypatch.setattr("kvist.engine.models.weights._FP8_DEVICES", ("cpu",))
    paths = fp8_checkpoint("llama", {"quant_method": "fp8"}), "llama", fp8_checkpoint("llama", {"quant_method": "fp8"})
    for path, is_compiled in zip(paths, (False, True, True), strict=True):
        torch._dynamo.reset()
        counters.clear()
        model = harness(path)
        pack_projections(model.model.decoder)
        if is_compiled:
            compile_layers(model.model.decoder)
        request = model.open(tokens)
        logits.append(torch.cat([model.step((request, 30)), model.step((request, 7)), model.decode(request, 40)]))
        num_graphs.append(counters["stats"]["unique_graphs"])
    torch.testing.assert_close(logits[2], logits[0], rtol=0, atol=0.05)
    assert num_graphs[0] == 0 < num_graphs[1] == num_graphs[2]


def test_a_packed_model_of_each_family_computes_what_it_did(family: str, harness) -> None:
    tokens, logits = torch.randint(3, 512, (40,)).tolist(), []
    for is_packed in (False, True):
        model = harness(family)
        if is_packed:
            pack_projections(model.model.decoder)
        logits.append(model.decode(model.open(tokens), 40))
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-4)


@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize("name", ["gemma3", "qwen3-moe"])
def test_after_steps_of_one_token_and_of_several_nothing_is_compiled(name: str, harness) -> None:
    model = harness(name)
    compile_layers(model.model.decoder)
    requests = [model.open([5 + i] * 20) for i in range(3)]
    model.step((requests[0], 3))
    model.step((requests[0], 1))
    before = counters["stats"]["unique_graphs"]
    for counts in ((1, 9, 0), (5, 1, 20), (10, 10, 0)):
        model.step(*((request, count) for request, count in zip(requests, counts, strict=True) if count))
    assert counters["stats"]["unique_graphs"] == before > 0
