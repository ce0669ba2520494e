"""FP8 weights stay FP8 where torch has products for them: here on a CPU, which has some, by a GPU's rules."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from kvist.engine.config import EngineConfig
from kvist.engine.loading import load_engine
from kvist.engine.models.config import load_model_config
from kvist.engine.models.projections import multiply_fp8, pack_projections, weights_without_memory
from kvist.engine.models.transformer import CausalLM
from kvist.errors import InvalidValueError

FP8 = torch.float8_e4m3fn
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
BY_TOKEN = COMPRESSED | {"config_groups": {"group_0": {"input_activations": {"dynamic": True, "strategy": "token"}}}}
METHODS: dict[str, dict[str, Any]] = {
    "FP8-dynamic": {"quantization": BY_TOKEN},
    "FP8": {"quantization": {"quant_method": "fp8", "activation_scheme": "static"}, "shape": ()},
    "Mistral's": {"quantization": {"quant_method": "fp8"}, "part": "weight_scale_inv", "shape": (1,)},
    "fbgemm": {"quantization": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}},
}
IN_BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 32]}
NUM_PROJECTIONS = 14  # of two layers


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return `[..., size]` rounded to FP8 with a scale for each row."""
    scale = x.double().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).to(FP8).double() * scale


def round_inputs(layer: Any) -> None:
    layer.forward = lambda x: functional.linear(rounded(x).float(), layer.weight, layer.bias)


def projections_of(model: nn.Module) -> list[Any]:
    return [each for each in model.decoder.model.layers.modules() if hasattr(each, "in_features")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_a_product_is_that_of_the_rounded_numbers(dtype: torch.dtype, num_tokens: int, keep_fp8) -> None:
    x, weight, scale = torch.randn(1, num_tokens, 48).to(dtype), torch.randn(32, 48).to(FP8), torch.rand(32, 1)
    x[0, -1] *= num_tokens == 1  # a token without a number
    keep_fp8()
    got = multiply_fp8(x, weight, scale)
    assert got.dtype == dtype
    error = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(got.double(), rounded(x) @ (weight.double() * scale).T, rtol=error, atol=1e-5)


def test_a_product_needs_no_number_on_the_host() -> None:
    """So steps are launched ahead and captured as graphs. Tensors of `meta` have no numbers."""
    x, scale = torch.empty(1, 3, 32, device="meta", dtype=torch.bfloat16), torch.empty(16, 1, device="meta")
    assert multiply_fp8(x, torch.empty(16, 32, device="meta", dtype=FP8), scale).shape == (1, 3, 16)


@pytest.mark.parametrize("method", METHODS)
def test_logits_of_each_method_are_those_of_numbers_rounded_by_hand(
    method: str, fp8_checkpoint, harness, keep_fp8
) -> None:
    """But for a few: a sum in another order may round to the next FP8 number."""
    path, tokens = fp8_checkpoint("llama-tied-biased-llama3", **METHODS[method]), torch.randint(3, 512, (40,)).tolist()
    dequantised, by_hand = harness(path), harness(path)
    for layer in projections_of(by_hand.model):
        round_inputs(layer)
    unrounded, expected = (model.step((model.open(tokens), 40)) for model in (dequantised, by_hand))
    keep_fp8()
    for is_packed in (False, True):
        model = harness(path)
        assert {layer.weight.dtype for layer in projections_of(model.model)} == {FP8}
        if is_packed:
            pack_projections(model.model.decoder)
        request = model.open(tokens)
        got = torch.cat([model.step((request, 21)), model.step((request, 9)), model.decode(request, 40)])
        errors = (got - expected).abs()
        assert errors.median() < 1e-5
        assert errors.max() < 0.05
        assert errors.mean() < (got - unrounded).abs().mean() / 10 < expected.std() / 50
        model.close(request)
        again = model.open(tokens)
        assert again.num_computed_tokens > 0
        torch.testing.assert_close(model.decode(again, 40)[-1], got[-1], rtol=0, atol=0.05)


def test_weights_take_a_byte_a_number_and_none_while_the_model_is_built(fp8_checkpoint, harness, keep_fp8) -> None:
    path = fp8_checkpoint("llama-tied-biased-llama3", BY_TOKEN)
    keep_fp8()
    model = harness(path).model
    for layer in projections_of(model):
        num_rows, num_columns = layer.weight.shape
        assert sum(each.nbytes for each in layer.parameters()) == num_rows * (num_columns + 4 + 4)  # scales, biases
    with weights_without_memory():
        empty = CausalLM(load_model_config(path), 64, torch.float32)
    assert {layer.weight.is_meta for layer in projections_of(empty)} == {True}
    head, embedding = empty.decoder.get_output_embeddings(), empty.decoder.get_input_embeddings()
    assert head.weight is embedding.weight
    assert not embedding.weight.is_meta


def in_blocks(tensors: dict[str, torch.Tensor]) -> None:
    """Repeat scales by tensor for blocks of 16 x 32; for a weight of 32 rows there are as many as rows would have."""
    for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
        rows, columns = tensors[name.removesuffix("_scale_inv")].shape
        tensors[name] = tensors[name].repeat(rows // 16, columns // 32)


@pytest.mark.parametrize(
    ("options", "num_fp8"),
    [
        *((method, NUM_PROJECTIONS) for method in METHODS.values()),
        ({"quantization": COMPRESSED | {"config_groups": {"group_0": {"input_activations": None}}}}, 0),
        ({"quantization": COMPRESSED | {"config_groups": BY_TOKEN["config_groups"] | {"group_1": {}}}}, 0),
        ({"quantization": COMPRESSED}, 0),
        (METHODS["Mistral's"] | {"quantization": IN_BLOCKS, "change": in_blocks}, 0),
    ],
)
def test_weights_are_the_checkpoints_and_the_log_says_how_many_stay(
    options: dict[str, Any], num_fp8: int, fp8_checkpoint: Callable[..., Any], harness, keep_fp8, caplog
) -> None:
    path = fp8_checkpoint("llama", **options)
    expected = harness(path).model.state_dict()
    keep_fp8()
    with caplog.at_level(logging.INFO, "kvist.engine.models.weights"):
        got = harness(path).model.state_dict()
    assert caplog.messages == [
        f"quantised weights loaded num_fp8={num_fp8} num_dequantised={NUM_PROJECTIONS - num_fp8}"
    ]
    assert sum(weight.dtype == FP8 for weight in got.values()) == num_fp8
    for name, weight in expected.items():
        torch.testing.assert_close(got[name].float() * got.get(f"{name}_scale", 1), weight)


@pytest.mark.parametrize(
    "error", [RuntimeError("only on compute capability >= 9.0"), ValueError("Invalid scaling"), None]
)
def test_weights_are_dequantised_where_torch_has_no_product_for_them(
    error: Exception | None, fp8_checkpoint, harness, keep_fp8, monkeypatch
) -> None:
    def scaled_mm(a: torch.Tensor, b: torch.Tensor, *_: Any, output_dtype: torch.dtype) -> torch.Tensor:
        if error is not None:
            raise error
        return torch.zeros(len(a), b.shape[1], dtype=output_dtype)  # or a wrong one

    keep_fp8()
    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    model = harness(fp8_checkpoint("llama", BY_TOKEN)).model
    assert {layer.weight.dtype for layer in projections_of(model)} == {torch.float32}


def test_a_quantised_head_is_dequantised_and_a_step_may_have_no_logits(
    fp8_checkpoint, keep_fp8, generate, greedy
) -> None:
    def quantize_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(FP8)
        tensors["lm_head.weight_scale"] = torch.ones(512, 1)

    path = fp8_checkpoint("llama", BY_TOKEN, change=quantize_head)
    products = keep_fp8()
    settings = EngineConfig(model_dir=path, block_size=4, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=16)
    core = load_engine(settings).core
    generate(core, [(list(range(3, 43)), greedy(2))])  # in three chunks, of which the first two need no logits
    assert (64, 512) not in products


def test_on_a_cpu_weights_are_dequantised(fp8_checkpoint, harness) -> None:
    model = harness(fp8_checkpoint("llama", BY_TOKEN)).model
    assert {layer.weight.dtype for layer in projections_of(model)} == {torch.float32}


def test_a_scale_of_no_number_is_named(fp8_checkpoint, harness, keep_fp8) -> None:
    name = "model.layers.1.mlp.up_proj.weight_scale"
    path = fp8_checkpoint("llama", BY_TOKEN, change=lambda tensors: tensors.update({name: tensors[name].to(FP8)}))
    keep_fp8()
    with pytest.raises(InvalidValueError, match=rf"dtype of {name}: .*float8"):
        harness(path)


def test_an_engine_generates_with_them(fp8_checkpoint, keep_fp8, generate, greedy, tokens_of) -> None:
    path = fp8_checkpoint("llama", BY_TOKEN)
    products = keep_fp8()
    core = load_engine(EngineConfig(model_dir=path, block_size=4, num_blocks=128, max_model_len=128)).core
    products.clear()
    output = generate(core, [(list(range(3, 33)), greedy(5))])["0"]
    assert len(tokens_of(output)) == 5
    assert len(products) == 5 * NUM_PROJECTIONS


def test_logits_of_each_family_are_those_of_numbers_rounded_by_hand(
    family: str, fp8_checkpoint, harness, keep_fp8
) -> None:
    path, tokens = fp8_checkpoint(family, METHODS["FP8"]["quantization"]), list(range(3, 43))
    by_hand = harness(path)
    keep_fp8()
    model = harness(path)
    for name, weight in model.model.decoder.state_dict().items():
        if weight.dtype == FP8:
            round_inputs(by_hand.model.decoder.get_submodule(name.removesuffix(".weight")))
    expected, got = (each.step((each.open(tokens), 40)) for each in (by_hand, model))
    assert (got - expected).abs().median() < 1e-5
