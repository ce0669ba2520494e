"""How many chats can a second of the router's CPU route by prefix, and how much latency does it add?

The whole router is measured: `kvist route` with a tokenizer of 32,000 words, KV events from four workers over ZeroMQ,
metrics and all defaults. Its own work is the bottleneck: workers answer from prepared bytes and clients parse only the
ends of answers, in processes of their own, which are scheduled as batch jobs: else on few cores each of their turns
would preempt a router's, whose caches go cold with it. CPU is that of the router and the processes it started, user and
system.
Baseline: smg, the successor of sglang-router, with its default policy cache_aware (an approximate tree over the text:
over HTTP it gets no events), which must route the same chats as well, and with round robin; logging off in both.

Each router has its own fleet. They take turns within each kind of work, and medians of the rounds are shown. Latency is
the time added to the same chats sent directly to a worker. With many clients, 64, the machine is saturated, and a
router's latency mostly reflects its share of the cores. Streams at an engine's pace have 256, which leave it idle at
times: each of their events is read by itself, where streams as fast as they can be sent are read in a few pieces, more
by a router that keeps up. `cached`, the share of prompt tokens that the workers had, shows whether it routed by prefix,
and `chats a connection` how often a connection to a worker was reused.

    pip install smg py-spy uvloop
    python benchmarks/bench_proxy.py [--quick] [--save] [--profile]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path

import uvloop
from _chat_clients import Load, Sample, drive, raise_descriptor_limit
from _chat_fleet import SIDES, Router
from _chats import WORKS, Chats, Work, make_model
from _common import report, table

from kvist.openai.tokenization import ChatTokenizer

FEW, MANY = "few", "many"
NUM_FEW = 2
BASELINE = "smg cache_aware"
PROFILED_SIDE = "kvist kv"
NUM_SHOWN = 25
WAITING = ("_worker (concurrent/futures/thread.py", "EpollSelector.select")
"""Where threads wait, though py-spy takes some of them for busy."""


def measure(router: Router, chats: Chats, work: Work, num_clients: int, duration_s: float) -> Sample:
    """Return a sample of one work through one router; what its many clients send again was sent before."""
    load = Load(router.port, chats, work)
    warm_up = 2 * work.pool_size if work.num_pooled and num_clients == work.num_clients else 0
    return uvloop.run(drive(load, num_clients, duration_s, router.cpu_s, warm_up))


def quantile_ms(samples: list[Sample], percent: int) -> float:
    """Return the median over samples of a percentile of their latencies."""
    cuts = [statistics.quantiles(sample.latencies_s, n=100)[percent - 1] for sample in samples]
    return statistics.median(cuts) * 1e3


def measure_work(
    routers: dict[str, Router], chats: Chats, work: Work, num_rounds: int, duration_s: float
) -> dict[str, dict[str, float]]:
    """Return the figures of one work by side."""
    samples: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    before = {side: router.fleet.counts() for side, router in routers.items()}
    for _ in range(num_rounds):
        for clients, num_clients, share in ((MANY, work.num_clients, 1.0), (FEW, NUM_FEW, 0.5)):
            for side, router in routers.items():
                samples[side, clients].append(measure(router, chats, work, num_clients, share * duration_s))
                router.fleet.counts()  # when it has computed what it was sent, which would slow the next one down
    figures = {}
    for side in SIDES:
        rates = [sample.num_answers / sample.cpu_s for sample in samples[side, MANY]]
        figures[side] = {"requests_per_cpu_s": statistics.median(rates), "least": min(rates), "greatest": max(rates)}
        counts = routers[side].fleet.counts()
        cached, sent = (counts[name] - before[side][name] for name in ("cached", "tokens"))
        figures[side]["cached"] = cached / sent
        num_chats, num_opened = (counts[name] - before[side][name] for name in ("chats", "opened"))
        figures[side]["chats_a_connection"] = num_chats / max(1, num_opened)
        for clients in (FEW, MANY):
            for percent in (50, 99):
                direct_ms = quantile_ms(samples["direct", clients], percent)
                added_ms = quantile_ms(samples[side, clients], percent) - direct_ms
                figures[side][f"p{percent}_added_ms_{clients}_clients"] = added_ms
    return figures


def profile(router: Router, chats: Chats, work: Work, duration_s: float) -> str:
    """Return where the microseconds of a request go, by the time of Python functions without those they call.

    Waiting for the interpreter's lock counts for the function that waits, and a library's time for its caller.
    """
    sample = measure(router, chats, work, work.num_clients, duration_s)
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        options = f"--pid {router.pid} --duration {duration_s:.0f} --rate 250 --format raw --output {file.name}"
        command = [str(Path(sys.executable).with_name("py-spy")), "record", *options.split()]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as spy:
            measure(router, chats, work, work.num_clients, 1.2 * duration_s)
            if spy.wait():
                raise RuntimeError("py-spy could not look into the router: it needs the right to trace processes")
        own: Counter[str] = Counter()
        for line in Path(file.name).read_text().splitlines():
            stack, _, number = line.rpartition(" ")
            own[stack.rpartition(";")[2].rpartition(":")[0]] += int(number)
        for waiting in [name for name in own if name.startswith(WAITING)]:
            del own[waiting]
    us = sample.cpu_s / sample.num_answers * 1e6
    rows = [(f"`{name}`", f"{us * number / own.total():.1f}") for name, number in own.most_common(NUM_SHOWN)]
    shown = sum(number for _, number in own.most_common(NUM_SHOWN))
    rows.append(("all others", f"{us * (1 - shown / own.total()):.1f}"))
    return f"{PROFILED_SIDE}, {work.name}: {us:.0f} µs of CPU a request\n\n" + table(["function", "own µs"], rows)


def main() -> None:
    """Measure, and print and keep the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--save", action="store_true", help="keep the result below benchmarks/results")
    parser.add_argument("--profile", action="store_true", help="show by py-spy where the time of Kvist's router goes")
    options = parser.parse_args()
    duration_s, num_rounds = (1.0, 1) if options.quick else (3.0, 3)
    raise_descriptor_limit()
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    works = [work for name, work in WORKS.items() if "kB" not in name]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_model(folder)
        ChatTokenizer.load(folder)  # warns where the router's tokens are made by tokenizers, slowly
        chats = Chats(folder)
        routers = {side: stack.enter_context(Router(side, folder)) for side in ("direct", *SIDES)}
        results = {work.name: measure_work(routers, chats, work, num_rounds, duration_s) for work in works}
        profiled = [work for work in works if "1,000" in work.name] if options.profile else []
        profiles = [profile(routers[PROFILED_SIDE], chats, work, 4 * duration_s) for work in profiled]
    show(results, profiles, options.save)


def show(results: dict[str, dict[str, dict[str, float]]], profiles: list[str], save: bool) -> None:
    """Print and keep the tables."""
    rows = [
        (
            work,
            side,
            f"{figures['requests_per_cpu_s']:.0f} ({figures['least']:.0f}–{figures['greatest']:.0f})",
            f"{figures['requests_per_cpu_s'] / by_side[BASELINE]['requests_per_cpu_s']:.2f}",
            f"{figures['cached']:.0%}",
            f"{figures['chats_a_connection']:.0f}",
            *(
                " / ".join(f"{figures[f'p{percent}_added_ms_{clients}_clients']:.2f}" for percent in (50, 99))
                for clients in (FEW, MANY)
            ),
        )
        for work, by_side in results.items()
        for side, figures in by_side.items()
    ]
    headers = ["work", "router", "requests / CPU s (least–greatest)", f"x {BASELINE}", "cached", "chats a connection"]
    headers += [f"p50 / p99 added, ms, {clients} clients" for clients in (FEW, MANY)]
    markdown = "\n\n".join([table(headers, rows), *profiles])
    rounded = {
        work: {
            side: {name: float(f"{value:.4g}") for name, value in figures.items()} for side, figures in sides.items()
        }
        for work, sides in results.items()
    }
    report("proxy", markdown, {"works": rounded}, ["smg", "fastokens", "uvloop"], save)


if __name__ == "__main__":
    main()
