"""`kvist simulate`: a recorded trace through simulated fleets, policy by policy."""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from importlib import import_module
from itertools import cycle, islice, product
from math import lcm
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kvist.cli._terminal import ShowProgress, display, make_table, progress_line, write_output
from kvist.errors import InvalidValueError

if TYPE_CHECKING:
    from kvist.simulate.memory import Memory
    from kvist.simulate.trace import Trace
    from kvist.simulate.worker import Machine

_LOADS = "0.7,0.9"

HELP = "simulate a recorded trace on fleets of several sizes and policies"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="file of JSON lines or folder of them; `conversations` or `tool-agents` to generate one; or `fit`",
    )
    add(
        "recording",
        nargs="?",
        metavar="RECORDING",
        help="with `fit`: print the workers' rates, fitted to these recorded requests",
    )
    add(
        "--policy",
        default="kv,kv-blocks,dynamo",
        metavar="NAMES",
        help="policies to compare (default %(default)s); `list` prints all",
    )
    add("--workers", default="8", metavar="N[,N...]", help="fleet sizes; 4..16 is 4, 8, 16 (default %(default)s)")
    add(
        "--prefill-workers",
        type=int,
        default=0,
        metavar="N",
        help="prefill workers besides, for long prompts (default 0)",
    )
    about_load = "offered load as shares of the fleet's capacity, if it had one pooled cache (default %(default)s)"
    add("--load", default=_LOADS, metavar="SHARES", help=about_load)
    add(
        "--max-ttft-p99",
        type=float,
        metavar="SECONDS",
        help="find the smallest fleet with this p99 of time to first token, at the trace's pace",
    )
    add("--speedup", type=float, metavar="N", help="instead of --load: arrivals at N times the trace's pace")
    add("--add-workers", type=int, default=0, metavar="N", help="also simulate N more workers")
    add("--silent", type=int, default=0, metavar="N", help="N workers send no KV events; also simulate that they do")
    add(
        "--closed-loop",
        action="store_true",
        help="send each turn of a session its recorded pause after the answer to the turn before",
    )
    add("--seeds", type=int, default=5, metavar="N", help="runs, each with arrivals drawn anew (default %(default)s)")
    add(
        "--requests",
        type=int,
        metavar="N",
        help="use the trace's first N requests (default: all), or generate N (default: 4000)",
    )
    add(
        "--rates",
        type=Path,
        metavar="FILE",
        help="rates of workers, used in turn, as `fit` prints them (default: 8B model on an H100)",
    )
    add(
        "--accelerator",
        metavar="NAME[xN]",
        help="instead of --rates: a100, h100x2 and so on, with the model of --model-path",
    )
    add(
        "--model-path",
        type=Path,
        metavar="DIR",
        help="folder of the model's config.json, for its windows and --accelerator",
    )
    add(
        "--prefill-rate", type=float, metavar="N", help="prefill tokens/s of a worker (default 25000, or as in --rates)"
    )
    add(
        "--speeds",
        default="1",
        metavar="N[,N...]",
        help="relative speeds of workers, used in turn (default %(default)s)",
    )
    add(
        "--cache-tokens",
        type=int,
        metavar="N",
        help="KV cache size of a worker in tokens (default 400000, or as in --rates)",
    )
    add(
        "--window",
        metavar="TOKENS:SHARE",
        help="sliding window and the share of layers that have it, as 1024:0.83 (default: that of --model-path)",
    )
    add(
        "--host-tokens",
        type=int,
        default=0,
        metavar="N",
        help="size of a worker's host-memory tier in tokens (default 0)",
    )
    add("--index-delay", type=float, default=0.05, metavar="SECONDS", help="delay of KV events (default %(default)s)")
    add(
        "--lost-events",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of KV events that are lost, 0 to 1 (default %(default)s)",
    )
    add("--outage", metavar="FROM..TO", help="take the first worker away for this part of the trace, as 0.4..0.6")
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="N",
        help="shape of gamma-distributed gaps; below 1 arrivals come in bursts (default 1: Poisson)",
    )
    add("--report", type=Path, metavar="FILE.html", help="write charts and tables to one HTML file")
    add("--json", type=Path, metavar="FILE", help="write the results of every run")


def run(args: argparse.Namespace) -> int:
    """Simulate and print a table; return 0."""
    from kvist.simulate.peers import POLICIES
    from kvist.simulate.report import changes, html_report, table, warnings

    if args.policy == "list":
        print("\n".join(POLICIES))
        return 0
    for name in args.policy.split(","):
        if name not in POLICIES:
            raise InvalidValueError("--policy", name, f"some of {', '.join(POLICIES)}")
    for flags, least, most, expected in (
        ("seeds prefill_rate speedup cache_tokens burstiness max_ttft_p99", 1e-9, 1e12, "more than 0"),
        ("add_workers silent index_delay prefill_workers host_tokens", 0.0, 1e12, "0 or more"),
        ("lost_events", 0.0, 1.0, "a share from 0 to 1"),
    ):
        for flag in flags.split():
            if (value := getattr(args, flag)) is not None and not least <= value <= most:
                raise InvalidValueError(f"--{flag.replace('_', '-')}", value, expected)
    with suppress(ModuleNotFoundError):
        import_module("kvist.router.compiled.loops")  # decisions take a quarter of the time
    for module in ("rich", *(("matplotlib",) if args.report is not None else ())):
        import_module(module)  # or its absence would show only after the simulation
    args.machines, args.memory = _machines(args), _memory(args)
    if args.trace == "fit":
        return _fit(args)
    if args.recording is not None:
        raise InvalidValueError("RECORDING", args.recording, "`fit` in front of it, or one TRACE")
    if args.load != _LOADS and (args.speedup or args.max_ttft_p99):
        raise InvalidValueError("--load", args.load, "neither --speedup nor --max-ttft-p99 beside it")
    if args.add_workers and args.max_ttft_p99:
        raise InvalidValueError("--add-workers", args.add_workers, "a fleet's size, and not --max-ttft-p99")
    args.outage = _outage(args.outage) if args.outage else None
    if args.silent > min(_sizes(args.workers)):
        raise InvalidValueError("--silent", args.silent, "no more than the smallest fleet has")
    if args.outage and min(_sizes(args.workers)) < 2:
        raise InvalidValueError("--workers", args.workers, "2 or more, where one is gone for a time")
    trace = _trace(args.trace, args.requests)
    for flag, path in (("--report", args.report), ("--json", args.json)):
        if path is not None:
            write_output(flag, path, None)
    if args.closed_loop:
        trace = trace.in_sessions()
    with progress_line() as show:
        if args.max_ttft_p99:
            rows = [_find_smallest_fleet(args, trace, policy, show) for policy in args.policy.split(",")]
        else:
            rows = list(_compare_fleets(args, trace, show))
    columns, *lines = table(rows)
    display(make_table(columns, lines), *changes(rows), *warnings(rows))
    if args.report is not None:
        write_output("--report", args.report, html_report(f"{args.trace}, {len(trace.requests)} requests", rows))
    if args.json is not None:
        left_out = ("run", "json", "report", "rates", "model_path", "memory")
        arguments = {name: value for name, value in vars(args).items() if name not in left_out}
        arguments["machines"] = [asdict(machine) for machine in args.machines]
        results = {"arguments": arguments, "requests": len(trace.requests), "results": rows}
        write_output("--json", args.json, json.dumps(results) + "\n")
    return 0


def _compare_fleets(args: argparse.Namespace, trace: Trace, show: ShowProgress) -> Iterator[dict[str, Any]]:
    """Yield a row for each load, fleet size and policy, and for each change of the fleet that is asked about."""
    loads = [None] if args.speedup else _numbers("--load", args.load)
    cells = list(product(loads, _sizes(args.workers), args.policy.split(",")))
    for number, (load, size, policy) in enumerate(cells):
        fleets = [(str(size), size, args.silent)]
        if args.add_workers:
            fleets.append((f"{size} + {args.add_workers}", size + args.add_workers, args.silent))
        if args.silent:
            fleets.append((f"{size} (all with events)", size, 0))
        for fleet, num_workers, num_silent in fleets:
            show(f"{policy}, {fleet} workers, load {load}", number, len(cells))
            runs = _run_seeds(args, trace, policy, load, size, num_workers, num_silent)
            pace = load or f"{args.speedup:g}x pace"
            yield {"load": pace, "workers": size, "fleet": fleet, "policy": policy, "runs": runs}


def _find_smallest_fleet(args: argparse.Namespace, trace: Trace, policy: str, show: ShowProgress) -> dict[str, Any]:
    """Return the row of the fewest workers whose median p99 is within the limit; more workers are taken as no worse."""
    sizes = range(min(_sizes(args.workers)), max(_sizes(args.workers)) + 1)

    @cache
    def runs_of(size: int) -> list[dict[str, float]]:
        show(f"{policy}, {size} workers", 0, None)
        return _run_seeds(args, trace, policy, None, size, size, args.silent)

    def is_enough(size: int) -> bool:
        return bool(median(each["ttft_p99_s"] for each in runs_of(size)) <= args.max_ttft_p99)

    at = bisect_left(sizes, True, key=is_enough)
    size = sizes[at] if at < len(sizes) else None
    row = {"load": f"{args.speedup or 1:g}x pace", "workers": size, "fleet": str(size or "none is enough")}
    return {**row, "policy": policy, "runs": runs_of(size or sizes[-1])}


def _run_seeds(
    args: argparse.Namespace,
    trace: Trace,
    policy: str,
    load: float | None,
    size: int,
    num_workers: int,
    num_silent: int,
) -> list[dict[str, float]]:
    """Return each seed's outcome for so many workers, at a `load` of `size` workers, or at the trace's own pace."""
    from kvist.simulate.fleet import Conditions, at_load, measure
    from kvist.simulate.peers import POLICIES

    num_more, memory = args.prefill_workers, args.memory
    machines, runs = list(islice(cycle(args.machines), max(size, num_workers) + num_more)), []
    conditions = Conditions(args.index_delay, args.lost_events, num_silent, args.outage, memory, num_more)
    for seed in range(args.seeds):
        if load:
            paced = at_load(trace, machines[: size + num_more], load, seed, args.burstiness, memory)
        else:
            paced = trace.redraw_arrivals(seed, 1 / (args.speedup or 1.0), args.burstiness)
        runs.append(asdict(measure(paced, POLICIES[policy], machines[: num_workers + num_more], seed, conditions)))
    return runs


def _machines(args: argparse.Namespace) -> list[Machine]:
    """Return the kinds of machines, which a fleet's workers have in turn."""
    from kvist.simulate.hardware import machine_of
    from kvist.simulate.rates import read_rates
    from kvist.simulate.worker import Machine

    if args.accelerator and (args.model_path is None or args.rates):
        raise InvalidValueError("--accelerator", args.accelerator, "a name, with --model-path and without --rates")
    kinds = read_rates(args.rates) if args.rates else [Machine()]
    if args.accelerator:
        kinds = [machine_of(args.accelerator, args.model_path)]
    if args.prefill_rate:
        kinds = [replace(each, prefill_s=1 / args.prefill_rate) for each in kinds]
    if args.cache_tokens:
        kinds = [replace(each, cache_tokens=args.cache_tokens) for each in kinds]
    speeds = _numbers("--speeds", args.speeds)
    pairs = islice(zip(cycle(kinds), cycle(speeds)), lcm(len(kinds), len(speeds)))
    return [kind.times_as_fast(speed) for kind, speed in pairs]


def _memory(args: argparse.Namespace) -> Memory:
    """Return the memory of every worker."""
    from kvist.simulate.hardware import memory_of
    from kvist.simulate.memory import Memory

    memory = memory_of(args.model_path) if args.model_path else Memory()
    if args.window:
        window, *shares = _numbers("--window", args.window.replace(":", ","))
        if len(shares) != 1 or shares[0] >= 1 or window < 1:
            raise InvalidValueError("--window", args.window, "tokens, and a share of the layers below 1: 1024:0.83")
        memory = Memory(int(window), shares[0])
    return replace(memory, host_tokens=args.host_tokens)


def _fit(args: argparse.Namespace) -> int:
    """Print the rates of a recording's workers, in the form that `--rates` reads."""
    from kvist.simulate.rates import fit
    from kvist.simulate.trace import read_lines

    if args.recording is None or not Path(args.recording).exists():
        raise InvalidValueError("RECORDING", args.recording, "a file or folder of `kvist route --record-requests`")
    fits = fit(line for _, line in read_lines(Path(args.recording)))
    cache_tokens = args.machines[0].cache_tokens
    machines = {name: asdict(replace(each.machine, cache_tokens=cache_tokens)) for name, each in fits.items()}
    print(json.dumps(machines, indent=1))
    for name, each in fits.items():
        print(f"{name}: {each.num_answers} answers, spans off by {each.error:.1%} at the median", file=sys.stderr)
    return 0


def _trace(name: str | None, num_requests: int | None) -> Trace:
    from kvist.simulate.trace import conversations, read_trace, tool_agents

    if num_requests is not None and num_requests < 2:
        raise InvalidValueError("--requests", num_requests, "2 or more")
    made_up = {"conversations": conversations, "tool-agents": tool_agents}.get(name or "")
    if name is None or (made_up is None and not Path(name).exists()):
        raise InvalidValueError("TRACE", name, "a file or a folder, or one of conversations, tool-agents and fit")
    return made_up(num_requests or 4000) if made_up else read_trace(Path(name), num_requests)


def _numbers(flag: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise InvalidValueError(flag, text, "numbers above 0, with commas between them")
    return numbers


def _outage(text: str) -> tuple[float, float]:
    try:
        begin, end = map(float, text.split(".."))
    except ValueError:
        begin = end = 0.0
    if not 0 <= begin < end <= 1:
        raise InvalidValueError("--outage", text, "two shares of the trace's time, as 0.4..0.6")
    return begin, end


def _sizes(text: str) -> list[int]:
    """Return fleet sizes; a range has its ends, and each double of the lower between them."""
    lower, dots, upper = text.partition("..")
    numbers = _numbers("--workers", f"{lower},{upper}" if dots else text)
    sizes = [*map(int, numbers)]
    if sizes != numbers or (dots and (len(sizes) != 2 or sizes[0] > sizes[1])):
        raise InvalidValueError("--workers", text, "numbers from 1 on, or a range such as 4..16")
    if dots:
        doubles = (sizes[0] * 2**power for power in range(sizes[1].bit_length()))
        sizes = [*(each for each in doubles if each < sizes[1]), sizes[1]]
    return sizes
