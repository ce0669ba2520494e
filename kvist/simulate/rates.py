"""Workers' speeds, fitted to a recording of the requests they answered.

A worker that computes is in some step, whose time is linear in the rates of a `Machine`. Two kinds of spans are known
to be full of steps, so that their times are linear in the rates, too:

    prompts  from when the first of prompts that wait one after the other was sent until the last has its first token
    answers  from an answer's first token until its end: a step a token, with the prompts that came between

    seconds = step_s · steps + prefill_s · (tokens + α · Σ position) + context_s · steps · context
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from http import HTTPStatus
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvist.errors import InvalidValueError
from kvist.simulate.memory import MAX_STEP_TOKENS
from kvist.simulate.trace import TraceLine
from kvist.simulate.worker import Machine

MIN_ANSWERS = 20
"""A worker with fewer answers has no rates."""
LEAST = 1e-12
"""In place of 0, as some rates are divisors."""
KEPT = 0.9
"""Share of spans that are fitted: those that the rates explain worst were slowed by something else."""

Floats = NDArray[np.float64]


class Fit(NamedTuple):
    """A worker's rates, and their error: the median relative error of the times that they predict for spans."""

    machine: Machine
    num_answers: int
    error: float


def fit(lines: Iterable[TraceLine]) -> dict[str, Fit]:
    """Return the rates of each worker with enough streamed answers; raises InvalidValueError where there is none."""
    by_worker: defaultdict[str, list[TraceLine]] = defaultdict(list)
    for each in lines:
        is_whole = each.first_byte_s is not None and each.total_s is not None and each.input_length
        if is_whole and each.worker is not None and each.streamed and each.status == HTTPStatus.OK:
            by_worker[each.worker].append(each)
    fits = {worker: _fit(each) for worker, each in sorted(by_worker.items()) if len(each) >= MIN_ANSWERS}
    if not fits:
        most = max(map(len, by_worker.values()), default=0)
        raise InvalidValueError("streamed answers in the recording", most, f"{MIN_ANSWERS} or more of one worker")
    return fits


def _fit(answers: Sequence[TraceLine]) -> Fit:
    sent_s, first_s, end_s = np.array([_times_s(each) for each in answers]).T
    order = np.argsort(first_s)
    sent_s, first_s, end_s = sent_s[order], first_s[order], end_s[order]
    num_tokens, num_output = (
        np.array([(each.input_length or 1, each.output_length or 1) for each in answers])[order]
    ).T
    overlaps = (each.predicted_cached_tokens if each.cached_tokens is None else each.cached_tokens for each in answers)
    cached = np.minimum(np.array([num or 0 for num in overlaps])[order], num_tokens - 1)
    computed, steps = num_tokens - cached, -(-(num_tokens - cached) // MAX_STEP_TOKENS)
    work = np.stack([steps, computed, computed * (cached + computed / 2)], 1)
    # A prompt that was sent before the one answered last had its first token waits behind it.
    starts = np.flatnonzero(np.r_[True, sent_s[1:] >= first_s[:-1]])
    begin_s, until_s = sent_s[starts], first_s[np.r_[starts[1:] - 1, len(answers) - 1]]
    prompts = np.add.reduceat(work, starts)
    rows, took_s = [], []

    def add(since_s: float, to_s: float, work: Floats) -> None:
        context = _overlaps(first_s, end_s, since_s, to_s) @ (num_tokens + num_output / 2) / (to_s - since_s)
        rows.append([*work, work[0] * context])
        took_s.append(to_s - since_s)

    for since_s, to_s, work in zip(begin_s, until_s, prompts, strict=True):
        is_amid_step = ((first_s < since_s) & (end_s > since_s)).any()
        add(since_s, to_s, work + np.array([is_amid_step / 2, 0, 0]))
    for since_s, to_s, num in zip(first_s, end_s, num_output, strict=True):
        if num > 1:
            between = (_overlaps(begin_s, until_s, since_s, to_s) / (until_s - begin_s)) @ prompts
            add(since_s, to_s, np.r_[num - 1, between[1:]])
    features, seconds = np.array(rows), np.array(took_s)
    kept = np.ones(len(seconds), bool)
    for _ in range(2):
        weights = 1 / np.sqrt(seconds[kept])
        rates = _fit_not_negative(features[kept] * weights[:, None], seconds[kept] * weights)
        errors = np.abs(features @ rates / seconds - 1)
        kept = errors <= np.quantile(errors, KEPT)
    step_s, prefill_s, bent_s, context_s = (max(LEAST, float(rate)) for rate in rates)
    return Fit(Machine(step_s, prefill_s, context_s, bent_s / prefill_s), len(answers), float(np.median(errors)))


def _times_s(answer: TraceLine) -> tuple[float, float, float]:
    """Return when a request was sent to its worker, had its first token, and its last."""
    arrived_s = answer.recording_started_at + (answer.timestamp or 0.0) / 1e3
    return arrived_s + answer.queue_s, arrived_s + (answer.first_byte_s or 0.0), arrived_s + (answer.total_s or 0.0)


def _overlaps(begin_s: Floats, end_s: Floats, since_s: float, to_s: float) -> Floats:
    overlaps: Floats = np.maximum(0.0, np.minimum(end_s, to_s) - np.maximum(begin_s, since_s))
    return overlaps


def _fit_not_negative(features: Floats, values: Floats) -> Floats:
    """Return the least-squares coefficients without negative ones: the best fit of any subset of the features."""
    best, least = np.zeros(features.shape[1]), float("inf")
    for used in product((False, True), repeat=features.shape[1]):
        if used[2] and not used[1]:  # a prompt's attention without the rest of its work makes no sense
            continue
        columns = np.flatnonzero(used)
        scale = np.linalg.norm(features[:, columns], axis=0)
        found = np.linalg.lstsq(features[:, columns] / scale, values)[0] / scale
        missed = float(np.linalg.norm(features[:, columns] @ found - values))
        if missed < least and (found >= 0).all():
            best, least = np.zeros(features.shape[1]), missed
            best[columns] = found
    return best


def read_rates(path: Path) -> list[Machine]:
    """Return the machines of a file such as `kvist simulate fit` prints; raises InvalidValueError."""
    try:
        by_worker = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, float]])
        machines = list(msgspec.convert(by_worker, dict[str, Machine], strict=False).values())
        unknown = {name for rates in by_worker.values() for name in rates} - {field.name for field in fields(Machine)}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidValueError("rates", str(path), f"an object of each worker's rates ({error})") from None
    if unknown:
        raise InvalidValueError("rates", ", ".join(sorted(unknown)), "names such as `kvist simulate fit` prints")
    if not machines or not all(0 < rate < float("inf") for machine in machines for rate in astuple(machine)):
        raise InvalidValueError("rates", str(path), "rates above 0 of one worker or more")
    return machines
