"""The gate follows measured costs: of descriptors, of bytes, and of copies; what is uncertain is not bounced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import InvalidValueError
from kvist.transfer.agents import SharedMemoryAgent
from kvist.transfer.bounce import CostModel, calibrate
from kvist.transfer.bounce.calibration import calibrate_agents
from kvist.transfer.bounce.gate import FRAGMENT_SIZES, CostCurve, Seconds

MIB = 1 << 20
SIZES = (1 << 10, 1 << 14, 1 << 18)

seconds = st.floats(0, 1e-3)
curves = st.builds(CostCurve, st.just(SIZES), st.tuples(seconds, seconds, seconds))
models = st.builds(CostModel, curves, curves, curves, seconds, seconds)
counts, sizes, writers = st.integers(1, 1 << 16), st.integers(1, 1 << 20), st.integers(1, 8)


class Host:
    """Takes 5 us for each fragment that it writes and 1 us for one that it copies, `slower` by rounds."""

    def __init__(self, *slower: Seconds, measurement_s: float = 0.01) -> None:
        self.asked: list[tuple[int, int]] = []
        self._slower = slower or (Seconds(1, 1, 1),)
        self._measurement_s = measurement_s

    def measure(self, num_fragments: int, size_bytes: int) -> Seconds:
        """Move nothing."""
        turn = self._slower[len(self.asked) // (1 + len(FRAGMENT_SIZES)) % len(self._slower)]
        self.asked.append((num_fragments, size_bytes))
        taken = self.exactly(num_fragments, size_bytes)
        return Seconds(*(factor * each_s for factor, each_s in zip(turn, taken, strict=True)))

    @staticmethod
    def exactly(num_fragments: int, size_bytes: int) -> Seconds:
        """Return what a transfer takes when nothing disturbs it."""
        return Seconds(*(1e-4 + num_fragments * (each_s + size_bytes / 8e9) for each_s in (5e-6, 1e-6, 1e-6)))

    def calibrate(self) -> CostModel:
        """Return what is known after a second in which each measurement takes its time."""
        return calibrate(self.measure, 4 * MIB, clock=lambda: len(self.asked) * self._measurement_s)


def test_few_blocks_of_many_bytes_are_accepted_whatever_their_number(new_costs: Callable[..., CostModel]) -> None:
    # A gate that counts blocks, 96 at least, skipped this transfer of 67: 433 MiB in fragments of 1 KiB.
    assert 67 < 96
    assert new_costs(per_descriptor_s=10e-6).prefers_bounce(433 * MIB // 1024, 433 * MIB)


def test_the_choice_follows_the_cost_of_a_descriptor(new_costs: Callable[..., CostModel]) -> None:
    total = 64 * MIB
    assert new_costs(per_descriptor_s=10e-6).prefers_bounce(total >> 10, total)
    assert not new_costs(per_descriptor_s=1e-9).prefers_bounce(total >> 10, total)
    assert not new_costs(per_descriptor_s=10e-6).prefers_bounce(total >> 18, total)


def test_one_fragment_for_each_writer_and_nothing_are_never_bounced(new_costs: Callable[..., CostModel]) -> None:
    dear = new_costs(per_descriptor_s=1.0)
    assert not dear.prefers_bounce(1, MIB)
    assert not dear.prefers_bounce(2, MIB, 2)
    assert dear.prefers_bounce(4, MIB, 2)
    assert not dear.prefers_bounce(0, 0)
    assert not dear.prefers_bounce(5, 0)


@given(model=models, count=counts, size=sizes, num_writers=writers)
def test_what_is_predicted_to_be_slower_is_never_chosen(
    model: CostModel, count: int, size: int, num_writers: int
) -> None:
    asked = (count, count * size, num_writers)
    if model.prefers_bounce(*asked):
        assert model.bounced_s(*asked) < model.per_fragment_s(*asked)


@given(model=models, count=counts, more=st.integers(1, 1 << 12), size=sizes, num_writers=writers)
def test_what_is_bounced_is_bounced_in_larger_numbers_too_and_takes_no_less(
    model: CostModel, count: int, more: int, size: int, num_writers: int
) -> None:
    few, many = (count, count * size, num_writers), (count + more, (count + more) * size, num_writers)
    assert model.per_fragment_s(*many) >= model.per_fragment_s(*few)
    assert model.bounced_s(*many) >= model.bounced_s(*few)
    gained_s = model.per_fragment_s(*few) - model.bounced_s(*few)
    if model.prefers_bounce(*few) and gained_s > 1e-9 * model.per_fragment_s(*few):  # more than what rounding does
        assert model.prefers_bounce(*many)


@given(model=models, count=counts, size=sizes)
def test_several_writers_write_at_a_time_and_one_scatter_waits_for_all(model: CostModel, count: int, size: int) -> None:
    one, two = (count, count * size), (count, count * size, 2)
    each_s = (curve.fragment_s(size) * count for curve in (model.write, model.send, model.scatter))
    write_s, send_s, scatter_s = each_s
    assert model.per_fragment_s(*one) - model.per_fragment_s(*two) == pytest.approx(write_s / 2, abs=1e-9)
    assert model.bounced_s(*one) - model.bounced_s(*two) == pytest.approx(send_s / 2, abs=1e-9)
    assert model.bounced_s(*two) >= scatter_s


def test_a_calibrated_model_predicts_what_was_measured_and_never_chooses_the_slower() -> None:
    host = Host()
    model = host.calibrate()
    for size in (1 << bits for bits in range(10, 19)):
        for count in (2, 16, 256, 64 * MIB // size):
            exact = host.exactly(count, size)
            assert model.per_fragment_s(count, count * size) == pytest.approx(exact.write, rel=0.1)
            assert model.bounced_s(count, count * size) == pytest.approx(exact.send + exact.scatter, rel=0.1)
            if model.prefers_bounce(count, count * size):
                assert exact.send + exact.scatter < exact.write


def test_a_gain_that_the_repetitions_do_not_agree_on_is_not_one() -> None:
    asked = (4096, 4 * MIB)
    assert Host().calibrate().prefers_bounce(*asked)
    at_times_slow = Host(Seconds(1, 1, 1), Seconds(1, 4, 4), Seconds(1, 1, 1), Seconds(1, 4, 4))
    assert not at_times_slow.calibrate().prefers_bounce(*asked)
    at_times_fast = Host(Seconds(1, 1, 1), Seconds(1, 1, 1), Seconds(0.3, 1, 1), Seconds(1, 1, 1))
    assert not at_times_fast.calibrate().prefers_bounce(*asked)


def test_one_disturbed_bounce_in_nine_changes_nothing() -> None:
    calm = (Seconds(1, 1, 1),) * 7
    model = Host(calm[0], Seconds(1, 50, 50), *calm).calibrate()
    assert model == Host().calibrate()


def test_a_write_of_larger_fragments_that_was_disturbed_each_time_is_not_taken_for_slow() -> None:
    def measure(num_fragments: int, size_bytes: int) -> Seconds:
        taken = Host.exactly(num_fragments, size_bytes)
        return taken._replace(write=10 * taken.write) if size_bytes == 1 << 18 else taken

    model = calibrate(measure, 4 * MIB)
    assert not model.prefers_bounce(256, 256 << 18)
    assert model.prefers_bounce(65536, 65536 << 10)


@pytest.mark.parametrize(("measurement_s", "num_rounds"), [(0.01, 9), (0.035, 5), (1.0, 3)])
def test_measuring_ends_after_a_second_but_not_before_three_rounds(measurement_s: float, num_rounds: int) -> None:
    host = Host(measurement_s=measurement_s)
    host.calibrate()
    assert len(host.asked) == 1 + num_rounds * (1 + len(FRAGMENT_SIZES))
    assert host.asked[0] == host.asked[1] == (2, 1024)
    assert all(count * size == 4 * MIB for count, size in host.asked[2:7])


def test_a_curve_is_flat_below_and_proportional_above_what_was_measured() -> None:
    curve = CostCurve((1024, 4096), (1.0, 2.0))
    assert curve.fragment_s(16) == 1.0
    assert curve.fragment_s(2560) == pytest.approx(1.5)
    assert curve.fragment_s(8192) == 4.0


@pytest.mark.parametrize(("sizes", "seconds"), [((), ()), ((2, 1), (1.0, 1.0)), ((1,), (-1.0,)), ((1, 2), (1.0,))])
def test_a_curve_without_rising_sizes_or_with_a_negative_cost_is_refused(
    sizes: tuple[int, ...], seconds: tuple[float, ...]
) -> None:
    with pytest.raises(InvalidValueError):
        CostCurve(sizes, seconds)


@pytest.mark.parametrize("field", ["write_fixed_s", "bounce_extra_s"])
def test_a_negative_cost_at_the_start_is_refused(field: str) -> None:
    curve = CostCurve((1,), (1.0,))
    fixed = {"write_fixed_s": 1.0, "bounce_extra_s": 1.0} | {field: -1.0}
    with pytest.raises(InvalidValueError, match=field):
        CostModel(curve, curve, curve, **fixed)


def test_too_little_memory_to_measure_in_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="total_bytes"):
        calibrate(Host().measure, total_bytes=1024)


def test_real_agents_are_measured_and_left_as_they_were() -> None:
    source, target = SharedMemoryAgent("source"), SharedMemoryAgent("target")
    model = calibrate_agents(source, target, total_bytes=MIB)
    assert model.write_fixed_s > 0
    assert max(model.scatter.seconds) > 0
    with pytest.raises(InvalidValueError, match="peer"):
        source.disconnect("target")  # type: ignore[arg-type]
    assert source.close()
    assert target.close()
