"""Quantised checkpoints, packed here number by number, against the numbers that were packed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvist.engine.config import EngineConfig
from kvist.engine.loading import load_engine
from kvist.engine.models.config import load_model_config
from kvist.engine.models.weights import load_model
from kvist.errors import InvalidValueError
from kvist.kvcache import KvDtype
from kvist.transfer.heads import WHOLE, Part

Tensors = dict[str, torch.Tensor]
Store = Callable[[torch.Tensor, np.random.Generator], tuple[Tensors, torch.Tensor]]
GROUP = 32
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def to_fp8(rows: int, columns: int, name: str = "weight_scale") -> Store:
    """Return a storage with a scale for each block of so many rows and columns, of all where 0."""

    def store(weight: torch.Tensor, _: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        high, wide = rows or weight.shape[0], columns or weight.shape[1]
        scales = torch.zeros(-(-weight.shape[0] // high), -(-weight.shape[1] // wide))
        stored, exact = torch.zeros_like(weight, dtype=torch.float8_e4m3fn), torch.zeros_like(weight)
        for i, j in np.ndindex(*scales.shape):
            block = np.s_[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
            scales[i, j] = weight[block].abs().max() / 448
            stored[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            exact[block] = stored[block].float() * scales[i, j]
        unused = {"input_scale": torch.ones(1), "k_scale": torch.ones(1)} if not rows else {}
        return {"weight": stored, name: scales if rows else scales.reshape(1)} | unused, exact

    return store


def to_int8(weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
    numbers = torch.from_numpy(rng.integers(-128, 128, weight.shape, np.int8))
    scales, zeros = torch.rand(len(weight), 1) * 1e-3, torch.from_numpy(rng.integers(-9, 9, (len(weight), 1), np.int8))
    exact = (numbers.float() - zeros.float()) * scales
    return {"weight": numbers, "weight_scale": scales, "weight_zero_point": zeros}, exact


def packed(numbers: np.ndarray, bits: int, order: Iterable[int] | None = None) -> torch.Tensor:
    """Return each row's numbers in int32s; the i-th of each lies at the `order[i]`-th place from below."""
    count = 32 // bits
    places = list(order or range(count))
    words = np.zeros((numbers.shape[0], numbers.shape[1] // count), np.uint32)
    for row, column in np.ndindex(*numbers.shape):
        words[row, column // count] |= np.uint32(int(numbers[row, column]) << bits * places[column % count])
    return torch.from_numpy(words.view(np.int32))


def grouped(weight: torch.Tensor, rng: np.random.Generator, bits: int, has_order: bool = False) -> Any:
    """Return numbers `[inputs, outputs]`, zeros and scales `[groups, outputs]`, groups of inputs, and the weight."""
    num_outputs, num_inputs = weight.shape
    num_groups = num_inputs // GROUP
    group_idx = np.arange(num_inputs) // GROUP
    if has_order:
        group_idx = rng.permutation(group_idx)
    numbers = rng.integers(0, 2**bits, (num_inputs, num_outputs))
    zeros = rng.integers(1, 2**bits, (num_groups, num_outputs))
    scales = torch.rand(num_groups, num_outputs).half() * 0.02
    exact = (torch.from_numpy(numbers - zeros[group_idx]) * scales.float()[group_idx]).T
    return numbers, zeros, scales, group_idx, exact


def to_awq(weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
    numbers, zeros, scales, _, exact = grouped(weight, rng, 4)
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    return {"qweight": packed(numbers, 4, order), "qzeros": packed(zeros, 4, order), "scales": scales}, exact


def to_gptq(bits: int, has_order: bool, lessened: int) -> Store:
    def store(weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        numbers, zeros, scales, group_idx, exact = grouped(weight, rng, bits, has_order)
        parts = {
            "qweight": packed(numbers.T, bits).T.contiguous(),
            "qzeros": packed(zeros - lessened, bits),
            "scales": scales,
            "g_idx": torch.from_numpy(group_idx.astype(np.int32)),
            "bias": torch.zeros(len(weight)),
        }
        return parts, exact

    return store


def to_compressed(bits: int, has_zeros: bool) -> Store:
    def store(weight: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        numbers, zeros, scales, _, exact = grouped(weight, rng, bits)
        if not has_zeros:
            exact += (torch.from_numpy(zeros - 2 ** (bits - 1)) * scales.float()).repeat_interleave(GROUP, 0).T
        parts = {
            "weight_packed": packed(numbers.T, bits),
            "weight_scale": scales.T.contiguous(),
            "weight_shape": torch.tensor(weight.shape),
        }
        return parts | ({"weight_zero_point": packed(zeros, bits).T.contiguous()} if has_zeros else {}), exact

    return store


@pytest.fixture
def quantized(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Write a random model with its layers' projections quantised, and once more with what that comes to."""

    def write(name: str, quantization: dict[str, Any], store: Store) -> tuple[Path, Path]:
        rng = np.random.default_rng(0)
        source, paths = checkpoint(name), (tmp_path / "quantized", tmp_path / "exact")
        tensors = load_file(source / "model.safetensors")
        exact = dict(tensors)
        for key in [key for key in tensors if key.endswith("_proj.weight")]:
            parts, exact[key] = store(tensors.pop(key), rng)
            tensors |= {key.replace("weight", part): tensor for part, tensor in parts.items()}
        for path, contents in zip(paths, (tensors, exact), strict=True):
            path.mkdir()
            shutil.copy(source / "config.json", path)
            save_file({key: tensor.contiguous() for key, tensor in contents.items()}, path / "model.safetensors")
        config = json.loads((source / "config.json").read_text())
        (paths[0] / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
        return paths

    return write


def load(path: Path, shard: Part = WHOLE) -> Tensors:
    model = load_model(path, load_model_config(path), 64, torch.float32, torch.device("cpu"), shard)
    return model.state_dict()


BLOCKS = {"config_groups": {"group_0": {"weights": {"block_structure": [48, 48]}}}}


@pytest.mark.parametrize(
    ("name", "quantization", "store"),
    [
        ("llama", {"quant_method": "fp8", "weight_block_size": [32, 48]}, to_fp8(32, 48, "weight_scale_inv")),
        ("qwen3-moe", {"quant_method": "fp8", "weight_block_size": [48, 32]}, to_fp8(48, 32, "weight_scale_inv")),
        ("llama", {"quant_method": "fp8"}, to_fp8(0, 0)),
        ("llama", {"quant_method": "fbgemm_fp8"}, to_fp8(1, 0)),
        ("phi3", {"quant_method": "compressed-tensors", "format": "float-quantized"}, to_fp8(1, 0)),
        ("llama", {"quant_method": "compressed-tensors", "format": "float-quantized", **BLOCKS}, to_fp8(48, 48)),
        ("llama", {"quant_method": "compressed-tensors", "format": "int-quantized"}, to_int8),
        ("llama", {"quant_method": "compressed-tensors", "format": "pack-quantized"}, to_compressed(4, False)),
        ("llama", {"quant_method": "compressed-tensors", "format": "pack-quantized"}, to_compressed(8, True)),
        ("llama", {"quant_method": "awq", "bits": 4, "version": "gemm"}, to_awq),
        ("llama", {"quant_method": "gptq", "bits": 4}, to_gptq(4, False, 1)),
        ("llama", {"quant_method": "gptq", "bits": 4, "desc_act": True}, to_gptq(4, True, 1)),
        ("qwen3-moe", {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"}, to_gptq(8, True, 0)),
    ],
)
def test_a_quantised_checkpoint_loads_as_what_was_packed(
    name: str, quantization: dict[str, Any], store: Store, quantized: Callable[..., tuple[Path, Path]]
) -> None:
    ours, exact = quantized(name, quantization, store)
    for shard in [WHOLE, Part(1, 2)] if name == "llama" else [WHOLE]:
        got, expected = load(ours, shard), load(exact, shard)
        assert got.keys() == expected.keys()
        for key in got:
            torch.testing.assert_close(got[key], expected[key], rtol=1e-6, atol=0)


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks and scales of experts `[num_experts, inputs, outputs]`, and what they come to."""
    columns = weight.transpose(1, 2).reshape(len(weight), weight.shape[2], -1, 32)
    exponents = columns.abs().amax(-1).log2().floor() - 2
    scaled = columns / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
    exact = torch.tensor(E2M1)[codes] * scaled.sign() * exponents.exp2()[..., None]
    nibbles = (codes + 8 * (scaled < 0)).to(torch.uint8)
    blocks = nibbles[..., 0::2] + 16 * nibbles[..., 1::2]
    return blocks, (exponents + 127).to(torch.uint8), exact.flatten(2).transpose(1, 2)


def test_gpt_oss_in_mxfp4_generates_what_transformers_does_of_its_numbers(
    checkpoint: Callable[[str], Path], tmp_path: Path, assert_generates_like
) -> None:
    tensors = load_file(checkpoint("gpt-oss") / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint("gpt-oss"), attn_implementation="eager")
    exact = model.state_dict()
    for key in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[f"{key}_blocks"], tensors[f"{key}_scales"], numbers = to_mxfp4(tensors.pop(key))
        exact[key].copy_(numbers)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((checkpoint("gpt-oss") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert_generates_like(model, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.0.mlp.up_proj.qzeros"), r"parts of .*up_proj.weight: .*gptq \('qzeros'\)"),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.scales": torch.ones(1, 128)}), r"parts of .*up_proj\.weight"),
        (lambda t: t.update({"model.norm.qweight": torch.ones(3)}), r"parts of model\.norm\.weight"),
    ],
)
def test_parts_that_make_no_weight_are_named(quantized, change: Callable[[Tensors], Any], message: str) -> None:
    path, _ = quantized("llama", {"quant_method": "gptq"}, to_gptq(4, False, 1))
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(InvalidValueError, match=message):
        load(path)


@pytest.mark.parametrize("name", ["self_attn.{}_scale", "self_attn.{}_proj.{}_scale", "self_attn.attn.{}_scale"])
def test_keys_and_values_out_of_range_fit_an_eight_bit_cache_by_their_scales(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path, harness: Callable[..., Any]
) -> None:
    tensors = load_file(checkpoint("llama") / "model.safetensors")
    for key, tensor in list(tensors.items()):
        for part, factor in (("q_proj", 2**-12), ("k_proj", 2**12), ("v_proj", 2**14), ("o_proj", 2**-14)):
            tensor.mul_(factor if part in key else 1)
        if key.endswith("k_proj.weight"):
            layer = key.partition("self_attn")[0]
            for kind, scale in (("k", 2.0**12), ("v", 2.0**14)):
                tensors[layer + name.format(kind, kind)] = torch.tensor([scale])
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    plain, scaled = (harness(model, kv_dtype=KvDtype.FP8_E4M3) for model in ("llama", tmp_path))
    prompt = list(range(3, 43))
    expected, got = (model.step((model.open(prompt), len(prompt))) for model in (plain, scaled))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
    told = [
        load_engine(EngineConfig(model_dir=path, kv_cache_dtype=dtype)).kv_cache_dtype
        for path, dtype in ((checkpoint("llama"), "fp8_e4m3"), (tmp_path, "fp8_e4m3"), (tmp_path, None))
    ]
    assert (told[0], told[2]) == ("fp8_e4m3", "float32")
    assert told[1].startswith("fp8_e4m3 scaled ")  # by which routers see that the blocks of the two are not alike
