"""The gate follows measured costs: of descriptors, of bytes, and of copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvist.errors import InvalidValueError
from kvist.transfer.agents import SharedMemoryAgent
from kvist.transfer.bounce import CostModel, calibrate
from kvist.transfer.bounce.calibration import calibrate_agents
from kvist.transfer.bounce.gate import CostCurve

MIB = 1 << 20


def linear(fixed_s: float, bytes_per_s: float) -> Callable[[int, int], float]:
    return lambda num_fragments, size_bytes: num_fragments * (fixed_s + size_bytes / bytes_per_s)


def test_few_blocks_of_many_bytes_are_accepted_whatever_their_number(new_costs: Callable[..., CostModel]) -> None:
    # A gate that counts blocks, 96 at least, skipped this transfer of 67: 433 MiB in fragments of 1 KiB.
    assert 67 < 96
    assert new_costs(per_descriptor_s=10e-6).prefers_bounce(433 * MIB // 1024, 433 * MIB)


def test_the_choice_follows_the_cost_of_a_descriptor(new_costs: Callable[..., CostModel]) -> None:
    total = 64 * MIB
    assert new_costs(per_descriptor_s=10e-6).prefers_bounce(total >> 10, total)
    assert not new_costs(per_descriptor_s=1e-9).prefers_bounce(total >> 10, total)
    assert not new_costs(per_descriptor_s=10e-6).prefers_bounce(total >> 18, total)


def test_one_fragment_and_nothing_are_never_bounced(new_costs: Callable[..., CostModel]) -> None:
    dear = new_costs(per_descriptor_s=1.0)
    assert not dear.prefers_bounce(1, MIB)
    assert not dear.prefers_bounce(0, 0)
    assert not dear.prefers_bounce(5, 0)


def test_a_calibrated_model_predicts_what_was_measured_and_never_chooses_the_slower() -> None:
    write, copy = linear(5e-6, 8e9), linear(0.2e-6, 10e9)
    model = calibrate(write, copy, copy, total_bytes=4 * MIB)
    for size_bytes in (1 << 10, 1 << 11, 1 << 13, 1 << 15, 1 << 17, 1 << 18, 1 << 20):
        num_fragments = 64 * MIB // size_bytes
        per_fragment_s = write(num_fragments, size_bytes)
        bounced_s = copy(num_fragments, size_bytes) * 2 + write(1, 64 * MIB)
        assert model.per_fragment_s(num_fragments, 64 * MIB) == pytest.approx(per_fragment_s, rel=0.15)
        assert model.bounced_s(num_fragments, 64 * MIB) == pytest.approx(bounced_s, rel=0.15)
        if model.prefers_bounce(num_fragments, 64 * MIB):
            assert bounced_s < per_fragment_s


def test_the_least_of_the_repetitions_counts() -> None:
    calls: list[int] = []

    def noisy(num_fragments: int, size_bytes: int) -> float:
        calls.append(size_bytes)
        return num_fragments * 1e-6 * (10 if len(calls) % 3 else 1)

    def quiet(num_fragments: int, size_bytes: int) -> float:  # noqa: ARG001
        return num_fragments * 1e-6

    model = calibrate(noisy, quiet, quiet, total_bytes=MIB)
    assert list(model.write.seconds) == pytest.approx([1e-6] * 6)
    assert len(calls) == 5 * (1 + 6)


def test_a_curve_is_flat_below_and_proportional_above_what_was_measured() -> None:
    curve = CostCurve((1024, 4096), (1.0, 2.0))
    assert curve.fragment_s(16) == 1.0
    assert curve.fragment_s(2048) == pytest.approx(2.0**0.5)
    assert curve.fragment_s(8192) == 4.0


@pytest.mark.parametrize(("sizes", "seconds"), [((), ()), ((2, 1), (1.0, 1.0)), ((1,), (0.0,)), ((1, 2), (1.0,))])
def test_a_curve_without_rising_sizes_or_positive_costs_is_refused(
    sizes: tuple[int, ...], seconds: tuple[float, ...]
) -> None:
    with pytest.raises(InvalidValueError):
        CostCurve(sizes, seconds)


def test_too_little_memory_to_measure_in_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="total_bytes"):
        calibrate(linear(1, 1), linear(1, 1), linear(1, 1), total_bytes=1024)


def test_real_agents_are_measured_and_left_as_they_were() -> None:
    source, target = SharedMemoryAgent("source"), SharedMemoryAgent("target")
    model = calibrate_agents(source, target, total_bytes=MIB)
    assert all(seconds > 0 for seconds in (*model.write.seconds, *model.gather.seconds, *model.scatter.seconds))
    with pytest.raises(InvalidValueError, match="peer"):
        source.disconnect("target")  # type: ignore[arg-type]
    assert source.close()
    assert target.close()
