"""`kvist simulate`: a recorded trace through simulated fleets, policy by policy."""

from __future__ import annotations

import argparse
import json
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kvist.cli._terminal import ShowProgress, progress_line
from kvist.errors import InvalidValueError

if TYPE_CHECKING:
    from kvist.simulate.trace import Trace

HELP = "choose a policy and a fleet's size by a trace, before they are bought"

COLUMNS = {
    "ttft_mean_s": "TTFT mean, s",
    "ttft_p50_s": "p50",
    "ttft_p99_s": "p99",
    "end_to_end_p99_s": "answer p99, s",
    "cached": "cached",
    "reuse": "of one cache's",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="TRACE", help="a Mooncake trace (JSON lines), or made up: `conversations` or `tool-agents`")
    add(
        "--policy",
        default="kv,kv-blocks,dynamo",
        metavar="NAMES",
        help="policies (default %(default)s); `list` says all",
    )
    add(
        "--workers",
        default="8",
        metavar="N[,N...]",
        help="fleet sizes; `4..16` doubles from 4 on (default %(default)s)",
    )
    add(
        "--load",
        default="0.7,0.9",
        metavar="SHARES",
        help="work that one shared cache of the fleet's size leaves, of what the fleet can do (default %(default)s)",
    )
    add(
        "--max-ttft-p99",
        type=float,
        metavar="SECONDS",
        help="find the smallest fleet for this, at the trace's own pace",
    )
    add("--speed", type=float, default=1.0, metavar="N", help="with --max-ttft-p99, N times that pace (default 1)")
    add("--seeds", type=int, default=5, metavar="N", help="runs with arrivals drawn anew (default %(default)s)")
    add("--requests", type=int, metavar="N", help="the trace's first N, or how many to make up (default: all; 4000)")
    add("--prefill-rate", type=float, default=25_000, metavar="N", help="tokens/s of a worker (default %(default)s)")
    add("--cache-tokens", type=int, default=400_000, metavar="N", help="that a worker caches (default %(default)s)")
    add("--index-delay", type=float, default=0.05, metavar="SECONDS", help="events come late (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every run's figures")


def run(args: argparse.Namespace) -> int:
    """Simulate and print a table; return 0."""
    from kvist.simulate.peers import POLICIES

    if args.policy == "list":
        print("\n".join(POLICIES))
        return 0
    for name in args.policy.split(","):
        if name not in POLICIES:
            raise InvalidValueError("--policy", name, f"some of {', '.join(POLICIES)}")
    for flag in ("seeds", "prefill_rate", "speed", "cache_tokens"):
        if not 0 < getattr(args, flag) < float("inf"):
            raise InvalidValueError(f"--{flag.replace('_', '-')}", getattr(args, flag), "more than 0")
    trace = _trace(args.trace, args.requests)
    with progress_line() as show:
        rows = list((_smallest if args.max_ttft_p99 else _cells)(args, trace, show))
    _print(rows)
    if args.json is not None:
        given = {name: value for name, value in vars(args).items() if isinstance(value, str | int | float)}
        args.json.write_text(json.dumps({"given": given, "requests": len(trace.requests), "results": rows}) + "\n")
    return 0


def _cells(args: argparse.Namespace, trace: Trace, show: ShowProgress) -> Iterator[dict[str, Any]]:
    """Yield a row for each load, fleet size and policy."""
    policies, sizes, loads = args.policy.split(","), _sizes(args.workers), _numbers("--load", args.load)
    cells = [(load, size, policy) for load in loads for size in sizes for policy in policies]
    for number, (load, size, policy) in enumerate(cells):
        show(f"{policy}, {size} workers, load {load:g}", number, len(cells))
        yield {"load": load, "workers": size, "policy": policy, "runs": _runs(args, trace, size, policy, load)}


def _smallest(args: argparse.Namespace, trace: Trace, show: ShowProgress) -> Iterator[dict[str, Any]]:
    """Yield a row for each policy, with the fewest workers whose median p99 is within the limit; more are no worse."""
    sizes = range(min(_sizes(args.workers)), max(_sizes(args.workers)) + 1)
    for policy in args.policy.split(","):
        tried: dict[int, list[dict[str, float]]] = {}

        def is_enough(size: int, policy: str = policy, tried: dict[int, list[dict[str, float]]] = tried) -> bool:
            show(f"{policy}, {size} workers", 0, None)
            tried[size] = _runs(args, trace, size, policy, None)
            return bool(median(each["ttft_p99_s"] for each in tried[size]) <= args.max_ttft_p99)

        at = bisect_left(sizes, True, key=is_enough)
        size = sizes[at] if at < len(sizes) else None
        yield {"load": "as recorded", "workers": size, "policy": policy, "runs": tried[size or sizes[-1]]}


def _runs(args: argparse.Namespace, trace: Trace, size: int, policy: str, load: float | None) -> list[dict[str, float]]:
    """Return each seed's figures, at a load or at the trace's own pace."""
    from kvist.simulate.fleet import at_load, measure
    from kvist.simulate.peers import POLICIES
    from kvist.simulate.worker import Machine

    machines, runs = [Machine(prefill_s=1 / args.prefill_rate, cache_tokens=args.cache_tokens)] * size, []
    for seed in range(args.seeds):
        paced = at_load(trace, machines, load, seed) if load else trace.spread(seed, 1 / args.speed)
        runs.append(asdict(measure(paced, POLICIES[policy], machines, seed, args.index_delay)))
    return runs


def _trace(name: str, num_requests: int | None) -> Trace:
    from kvist.simulate.trace import conversations, read_trace, tool_agents

    if num_requests is not None and num_requests < 2:
        raise InvalidValueError("--requests", num_requests, "2 or more")
    made_up = {"conversations": conversations, "tool-agents": tool_agents}.get(name)
    return made_up(num_requests or 4000) if made_up else read_trace(Path(name), num_requests)


def _numbers(flag: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise InvalidValueError(flag, text, "numbers above 0, with commas between them")
    return numbers


def _sizes(text: str) -> list[int]:
    """Return fleet sizes; a range has its ends, and each double of the lower between them."""
    lower, dots, upper = text.partition("..")
    sizes = [int(number) for number in _numbers("--workers", f"{lower},{upper}" if dots else text)]
    if min(sizes) < 1 or (dots and (len(sizes) != 2 or sizes[0] > sizes[1])):
        raise InvalidValueError("--workers", text, "numbers from 1 on, or a range such as 4..16")
    if dots:
        doubles = (sizes[0] * 2**power for power in range(sizes[1].bit_length()))
        sizes = [*(each for each in doubles if each < sizes[1]), sizes[1]]
    return sizes


def _print(rows: list[dict[str, Any]]) -> None:
    """Print medians over seeds, with the lowest and the highest."""
    lines = [["load", "workers", "policy", *COLUMNS.values()]]
    for row in rows:
        cells = [str(row["load"]), str(row["workers"] or "none is enough"), row["policy"]]
        for name in COLUMNS:
            values, form = [each[name] for each in row["runs"]], "{:.1%}" if name in ("cached", "reuse") else "{:.3g}"
            middle, low, high = (form.format(each) for each in (median(values), min(values), max(values)))
            cells.append(middle if len(values) == 1 else f"{middle} ({low} to {high})")
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
