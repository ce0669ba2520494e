"""Mixtures of experts against the loop over tokens that they stand for."""

from __future__ import annotations

import pytest
import torch

from kvist.engine.models.config import Activation, ClampedSwiglu, ModelConfig, MoeConfig
from kvist.engine.models.layers import activate
from kvist.engine.models.moe import Experts, choose_experts, clamped_swiglu
from kvist.errors import InvalidValueError

HIDDEN, SIZE, NUM_EXPERTS = 24, 20, 7


def make_experts() -> Experts:
    torch.manual_seed(0)
    config = ModelConfig(
        architecture="X",
        vocab_size=8,
        hidden_size=HIDDEN,
        num_heads=1,
        max_position=8,
        norm_eps=1e-6,
        activation=Activation.SILU,
        layers=(),
        attention_scale=1.0,
    )
    experts = Experts(config, MoeConfig(NUM_EXPERTS, 2, SIZE, is_normalised=True)).requires_grad_(False)
    for parameter in experts.parameters():
        parameter.normal_()
    return experts


def one_by_one(experts: Experts, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(hidden)
    for token, (chosen, shares) in enumerate(zip(expert_ids.tolist(), weights, strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = (experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
            out[token] += share * (experts.down_proj[expert] @ (activate(Activation.SILU, gate) * up))
    return out


@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize("top_k", [1, 3, NUM_EXPERTS])
def test_grouped_experts_are_the_sum_of_each_tokens_own(num_tokens: int, top_k: int) -> None:
    experts = make_experts()
    hidden = torch.randn(num_tokens, HIDDEN)
    expert_ids, weights = choose_experts(torch.randn(num_tokens, NUM_EXPERTS), top_k, is_normalised=False)
    expected = one_by_one(experts, hidden, expert_ids, weights)
    torch.testing.assert_close(experts(hidden, expert_ids, weights), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("expert", [0, NUM_EXPERTS - 1])
def test_all_tokens_may_go_to_one_expert(expert: int) -> None:
    experts = make_experts()
    hidden, expert_ids, weights = torch.randn(5, HIDDEN), torch.full((5, 1), expert), torch.rand(5, 1)
    expected = one_by_one(experts, hidden, expert_ids, weights)
    torch.testing.assert_close(experts(hidden, expert_ids, weights), expected, rtol=1e-4, atol=1e-4)


def test_a_token_gets_the_same_whoever_shares_its_step() -> None:
    experts = make_experts()
    hidden, (expert_ids, weights) = torch.randn(9, HIDDEN), choose_experts(torch.randn(9, NUM_EXPERTS), 2, True)
    together = experts(hidden, expert_ids, weights)
    alone = torch.cat([experts(hidden[i : i + 1], expert_ids[i : i + 1], weights[i : i + 1]) for i in range(9)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-4)


def test_weights_are_shares_of_all_experts_or_of_the_chosen() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, -1.0]], dtype=torch.bfloat16)
    expert_ids, of_all = choose_experts(scores, 2, is_normalised=False)
    _, of_chosen = choose_experts(scores, 2, is_normalised=True)
    assert expert_ids.tolist() == [[1, 2]]
    torch.testing.assert_close(of_all, scores.float().softmax(-1)[:, [1, 2]])
    torch.testing.assert_close(of_chosen, torch.tensor([[3.0, 2.0]]).softmax(-1))
    assert of_all.dtype == of_chosen.dtype == torch.float32


def test_the_clamped_gate_holds_its_inputs_within_the_limit() -> None:
    swiglu = ClampedSwiglu(alpha=2.0, limit=1.0)
    gate_up = torch.tensor([9.0, 9.0, -9.0, -9.0])  # gate, up, gate, up
    gated = clamped_swiglu(gate_up, swiglu)
    low = -9.0 * torch.sigmoid(torch.tensor(-18.0))
    torch.testing.assert_close(gated, torch.stack([torch.sigmoid(torch.tensor(2.0)) * 2.0, low * 0.0]))


def test_a_token_cannot_have_more_experts_than_there_are() -> None:
    with pytest.raises(InvalidValueError, match="num_experts_per_tok: got 9, expected at most the 8 experts"):
        MoeConfig(8, 9, 32, is_normalised=True)
