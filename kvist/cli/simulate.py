"""`kvist simulate`: a recorded trace through simulated fleets, policy by policy."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from itertools import count, cycle, islice, product
from math import inf, lcm
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from kvist.cli._settings import add_settings, read_config
from kvist.cli._terminal import ShowProgress, display, make_table, progress_line, write_output
from kvist.errors import InvalidValueError
from kvist.settings import Count, check_fields

if TYPE_CHECKING:
    from kvist.simulate.fleet import Conditions
    from kvist.simulate.memory import Memory
    from kvist.simulate.trace import Trace
    from kvist.simulate.worker import Machine

_logger = logging.getLogger(__name__)

_LOADS = "0.7,0.9"
_NotNegative = Annotated[int, Meta(ge=0)]
_Positive = Annotated[float, Meta(gt=0, le=1e12)]

HELP = "simulate a recorded trace on fleets of several sizes and policies"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """Which fleets to simulate, under which circumstances. Raises InvalidValueError that names the field."""

    policy: str = "kv,kv-blocks,dynamo"
    """policies to compare, with commas between them; `list` prints all"""
    workers: str = "8"
    """fleet sizes, as 4,8; 4..16 is 4, 8, 16"""
    prefill_workers: _NotNegative = 0
    """prefill workers besides, for long prompts"""
    load: str = _LOADS
    """offered load as shares of the fleet's capacity, if it had one pooled cache, as 0.5,0.85"""
    max_ttft_p99: _Positive | None = None
    """find the smallest fleet with this p99 of time to first token in seconds, at the trace's pace"""
    speedup: _Positive | None = None
    """instead of --load: arrivals at so many times the trace's pace"""
    add_workers: _NotNegative = 0
    """also simulate so many more workers"""
    silent: _NotNegative = 0
    """so many workers send no KV events; also simulate that they do"""
    closed_loop: bool = False
    """send each turn of a session its recorded pause after the answer to the turn before"""
    seeds: Count = 5
    """runs, each with arrivals drawn anew"""
    requests: Annotated[int, Meta(ge=2)] | None = None
    """use so many of the trace's first requests, by default all, or generate them, by default 4000"""
    rates: Path | None = None
    """file with rates of workers, used in turn, as `fit` prints them; by default an 8B model's on an H100"""
    accelerator: str | None = None
    """instead of --rates: a100, h100x2 and so on, with the model of --model-path"""
    model_path: Path | None = None
    """folder of the model's config.json, for its windows and --accelerator"""
    prefill_rate: _Positive | None = None
    """prefill tokens a second of a worker; by default 25000, or as in --rates"""
    speeds: str = "1"
    """relative speeds of workers, used in turn, as 1,1,0.5"""
    cache_tokens: Count | None = None
    """KV cache size of a worker in tokens; by default 400000, or as in --rates"""
    window: str | None = None
    """sliding window and the share of layers that have it, as 1024:0.83; by default that of --model-path"""
    host_tokens: _NotNegative = 0
    """size of a worker's host-memory tier in tokens"""
    index_delay: Annotated[float, Meta(ge=0)] = 0.05
    """seconds by which KV events are late"""
    lost_events: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """share of KV events that are lost, 0 to 1"""
    outage: str | None = None
    """take the first worker away for this part of the trace, as 0.4..0.6"""
    burstiness: _Positive = 1.0
    """shape of gamma-distributed gaps: 1 is Poisson, below it arrivals come in bursts"""
    report: Path | None = None
    """file for charts and tables, as one page of HTML"""
    json: Path | None = None
    """file for the results of every run"""

    def __post_init__(self) -> None:
        check_fields(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "file of JSON lines or folder of them; `conversations` or `tool-agents` to generate one; or `fit`"
    parser.add_argument("trace", nargs="?", metavar="TRACE", help=text)
    text = "with `fit`: print the workers' rates, fitted to these recorded requests"
    parser.add_argument("recording", nargs="?", metavar="RECORDING", help=text)
    add_settings(parser, SimulateConfig, {}, has_file=False)


def run(args: argparse.Namespace) -> int:
    from kvist.simulate.fleet import Conditions
    from kvist.simulate.peers import POLICIES
    from kvist.simulate.report import changes, html_report, table, warnings

    config = _read_config(args)
    if config.policy == "list":
        print("\n".join(POLICIES))
        return 0
    for name in config.policy.split(","):
        if name not in POLICIES:
            raise InvalidValueError("--policy", name, f"some of {', '.join(POLICIES)}")
    with suppress(ModuleNotFoundError):
        import_module("kvist.router.compiled.loops")  # decisions take a quarter of the time
    for module in ("rich", *(("matplotlib",) if config.report is not None else ())):
        import_module(module)  # or its absence would show only after the simulation
    machines, memory = _machines(config), _memory(config)
    if args.trace == "fit":
        return _fit(args.recording, machines[0].cache_tokens)
    if args.recording is not None:
        raise InvalidValueError("RECORDING", args.recording, "`fit` in front of it, or one TRACE")
    if config.load != _LOADS and (config.speedup or config.max_ttft_p99):
        raise InvalidValueError("--load", config.load, "neither --speedup nor --max-ttft-p99 beside it")
    if config.add_workers and config.max_ttft_p99:
        raise InvalidValueError("--add-workers", config.add_workers, "a fleet's size, and not --max-ttft-p99")
    outage, sizes = _outage(config.outage) if config.outage else None, _sizes(config.workers)
    if config.silent > min(sizes):
        raise InvalidValueError("--silent", config.silent, "no more than the smallest fleet has")
    if outage and min(sizes) < 2:
        raise InvalidValueError("--workers", config.workers, "2 or more, where one is gone for a time")
    trace = _trace(args.trace, config.requests)
    if max(sizes) + config.add_workers + config.prefill_workers > len(trace.requests):
        expected = f"fleets of no more workers than the trace has requests, {len(trace.requests)}"
        raise InvalidValueError("--workers", config.workers, expected)
    for flag, path in (("--report", config.report), ("--json", config.json)):
        if path is not None:
            write_output(flag, path, None)
    if config.closed_loop:
        trace = trace.in_sessions()
    if trace.comes_at_once and not (config.speedup or config.max_ttft_p99):
        expected = "a trace, or sessions in it, that begin at different times; or --speedup 1 instead"
        raise InvalidValueError("--load", config.load, expected)
    conditions = Conditions(
        config.index_delay, config.lost_events, config.silent, outage, memory, config.prefill_workers
    )
    shown = ",".join(map(str, sizes))
    _logger.info(
        "simulating requests=%d seeds=%d workers=%s policies=%s",
        len(trace.requests),
        config.seeds,
        shown,
        config.policy,
    )
    fleets, rows, code = _Fleets(config, trace, machines, conditions), list[dict[str, Any]](), 0
    with progress_line() as show:
        try:
            for row in fleets.find_smallest(show) if config.max_ttft_p99 else fleets.compare(show):
                rows.append(row)
        except KeyboardInterrupt:
            if not rows:
                raise
            code = 130  # what is done took minutes
            _logger.warning("interrupted; what is done follows")
    columns, *lines = table(rows)
    display(make_table(columns, lines), *changes(rows), *warnings(rows))
    if config.report is not None:
        left_out = {"requests": config.requests, "report": config.report, "json": config.json}
        defaults = asdict(SimulateConfig()) | left_out | {"seeds": None}
        given = {name: value for name, value in asdict(config).items() if value != defaults[name]}
        flags = (f" --{name.replace('_', '-')}" + f" {value}" * (value is not True) for name, value in given.items())
        title = f"{args.trace}{''.join(flags)}, {len(trace.requests)} requests"
        write_output("--report", config.report, html_report(title, rows))
    if config.json is not None:
        unnamed = ("json", "report", "rates", "model_path")
        arguments = {name: value for name, value in asdict(config).items() if name not in unnamed}
        arguments |= {"trace": args.trace, "outage": outage}
        arguments["machines"] = [asdict(machine) for machine in machines]
        results = {"arguments": arguments, "requests": len(trace.requests), "results": rows}
        write_output("--json", config.json, json.dumps(results) + "\n")
    return code


def _read_config(args: argparse.Namespace) -> SimulateConfig:
    """Return the flags' values; raises InvalidValueError, which names the flag."""
    paths = dict.fromkeys(("rates", "model_path", "report", "json"), Path)
    try:
        return read_config(args, SimulateConfig, paths)
    except InvalidValueError as error:
        raise InvalidValueError(f"--{error.field.replace('_', '-')}", error.value, error.expected) from None


@dataclass(frozen=True, slots=True)
class _Fleets:
    """Simulates fleets of several sizes; each method yields or returns rows of the report."""

    config: SimulateConfig
    trace: Trace
    machines: Sequence[Machine]
    """The kinds of machines, which a fleet's workers have in turn."""
    conditions: Conditions

    def compare(self, show: ShowProgress) -> Iterator[dict[str, Any]]:
        """Yield a row for each load, fleet size and policy, and for each change of the fleet that is asked about."""
        config, silent = self.config, self.config.silent
        loads = [None] if config.speedup else _numbers("--load", config.load)
        cells, done = list(product(loads, _sizes(config.workers), config.policy.split(","))), count()
        num_runs = len(cells) * config.seeds * (1 + bool(config.add_workers) + bool(silent))

        def show_next(text: str) -> None:
            show(text, next(done), num_runs)

        for load, size, policy in cells:
            fleets = [(str(size), size, silent)]
            if config.add_workers:
                fleets.append((f"{size} + {config.add_workers}", size + config.add_workers, silent))
            if silent:
                fleets.append((f"{size} (all with events)", size, 0))
            for fleet, num_workers, num_silent in fleets:
                pace = load or f"{config.speedup:g}x pace"
                show_run = partial(show_next, f"{policy}, {fleet} workers, load {pace}")
                runs = self._run_seeds(policy, load, size, num_workers, num_silent, show_run)
                yield {"load": pace, "workers": size, "fleet": fleet, "policy": policy, "runs": runs}

    def find_smallest(self, show: ShowProgress) -> Iterator[dict[str, Any]]:
        """Yield for each policy the row of the fewest workers that keep the limit; more are taken as no worse."""
        for policy in self.config.policy.split(","):
            yield self._find_smallest(policy, self.config.max_ttft_p99 or inf, show)

    def _find_smallest(self, policy: str, max_ttft_p99_s: float, show: ShowProgress) -> dict[str, Any]:
        sizes, runs_of = _sizes(self.config.workers), dict[int, list[dict[str, float]]]()

        def is_enough(size: int) -> bool:
            show_run = partial(show, f"{policy}, {size} workers", 0, None)
            runs_of[size] = self._run_seeds(policy, None, size, size, self.config.silent, show_run)
            return bool(median(each["ttft_p99_s"] for each in runs_of[size]) <= max_ttft_p99_s)

        candidates = range(min(sizes), max(sizes) + 1)
        at = bisect_left(candidates, True, key=is_enough)
        size = candidates[at] if at < len(candidates) else None
        row = {"load": f"{self.config.speedup or 1:g}x pace", "workers": size, "fleet": str(size or "none is enough")}
        return {**row, "policy": policy, "runs": runs_of[size or candidates[-1]]}

    def _run_seeds(
        self,
        policy: str,
        load: float | None,
        size: int,
        num_workers: int,
        num_silent: int,
        show_run: Callable[[], None],
    ) -> list[dict[str, float]]:
        """Return each seed's outcome for so many workers, at a `load` of `size` workers, or at the trace's own pace."""
        from kvist.simulate.fleet import at_load, measure
        from kvist.simulate.peers import POLICIES

        config, num_more = self.config, self.config.prefill_workers
        machines, runs = list(islice(cycle(self.machines), max(size, num_workers) + num_more)), []
        conditions = replace(self.conditions, num_silent=num_silent)
        for seed in range(config.seeds):
            show_run()
            if load:
                fleet = machines[: size + num_more]
                paced = at_load(self.trace, fleet, load, seed, config.burstiness, conditions.memory)
            else:
                paced = self.trace.redraw_arrivals(seed, 1 / (config.speedup or 1.0), config.burstiness)
            runs.append(asdict(measure(paced, POLICIES[policy], machines[: num_workers + num_more], seed, conditions)))
        return runs


def _machines(config: SimulateConfig) -> list[Machine]:
    """Return the kinds of machines, which a fleet's workers have in turn."""
    from kvist.simulate.hardware import machine_of
    from kvist.simulate.rates import read_rates
    from kvist.simulate.worker import Machine

    kinds = read_rates(config.rates) if config.rates else [Machine()]
    if config.accelerator:
        if config.model_path is None or config.rates:
            expected = "a name, with --model-path and without --rates"
            raise InvalidValueError("--accelerator", config.accelerator, expected)
        kinds = [machine_of(config.accelerator, config.model_path)]
    if config.prefill_rate:
        kinds = [replace(each, prefill_s=1 / config.prefill_rate) for each in kinds]
    if config.cache_tokens:
        kinds = [replace(each, cache_tokens=config.cache_tokens) for each in kinds]
    speeds = _numbers("--speeds", config.speeds)
    pairs = islice(zip(cycle(kinds), cycle(speeds)), lcm(len(kinds), len(speeds)))
    return [kind.times_as_fast(speed) for kind, speed in pairs]


def _memory(config: SimulateConfig) -> Memory:
    from kvist.simulate.hardware import memory_of
    from kvist.simulate.memory import Memory

    memory = memory_of(config.model_path) if config.model_path else Memory()
    if config.window:
        window, *shares = _numbers("--window", config.window, ":")
        if len(shares) != 1 or shares[0] >= 1 or window < 1:
            raise InvalidValueError("--window", config.window, "tokens, and a share of the layers below 1: 1024:0.83")
        memory = Memory(int(window), shares[0])
    return replace(memory, host_tokens=config.host_tokens)


def _fit(recording: str | None, cache_tokens: int) -> int:
    """Print the rates of a recording's workers, in the form that `--rates` reads."""
    from kvist.simulate.rates import fit
    from kvist.simulate.trace import read_lines

    if recording is None or not Path(recording).exists():
        raise InvalidValueError("RECORDING", recording, "a file or folder of `kvist route --record-requests`")
    fits = fit(line for _, line in read_lines(Path(recording)))
    machines = {name: asdict(replace(each.machine, cache_tokens=cache_tokens)) for name, each in fits.items()}
    print(json.dumps(machines, indent=1))
    for name, each in fits.items():
        print(f"{name}: {each.num_answers} answers, spans off by {each.error:.1%} at the median", file=sys.stderr)
    return 0


def _trace(name: str | None, num_requests: int | None) -> Trace:
    from kvist.simulate.trace import conversations, read_trace, tool_agents

    made_up = {"conversations": conversations, "tool-agents": tool_agents}.get(name or "")
    if name is None or (made_up is None and not Path(name).exists()):
        raise InvalidValueError("TRACE", name, "a file or a folder, or one of conversations, tool-agents and fit")
    return made_up(num_requests or 4000) if made_up else read_trace(Path(name), num_requests)


def _numbers(flag: str, text: str, separator: str = ",") -> list[float]:
    try:
        numbers = [float(part) for part in text.split(separator)]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise InvalidValueError(flag, text, f"numbers above 0, with {separator!r} between them")
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
    dots = ".." if ".." in text else ""
    numbers = _numbers("--workers", text, dots or ",")
    sizes = [*map(int, numbers)]
    if sizes != numbers or (dots and (len(sizes) != 2 or sizes[0] > sizes[1])):
        raise InvalidValueError("--workers", text, "numbers from 1 on, or a range such as 4..16")
    if dots:
        doubles = (sizes[0] * 2**power for power in range(sizes[1].bit_length()))
        sizes = [*(each for each in doubles if each < sizes[1]), sizes[1]]
    return sizes
