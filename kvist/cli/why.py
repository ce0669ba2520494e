"""`kvist why`: where the hits of a router's requests went, of one that runs or of a recording."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvist.cli._client import add_admin_key, ask_router, reading
from kvist.cli._terminal import display, make_table
from kvist.errors import InvalidValueError

if TYPE_CHECKING:
    from kvist.router.regret import Routed
    from kvist.simulate.trace import TraceLine

HELP = "explain lost cache hits: what caches could have saved, and why they did not"

_CACHE_TOKENS = 400_000
LOSSES = ("lost tokens", "share", "cause", "remedy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="URL|RECORDING", help="a router, or the folder or a file of `kvist route --record-requests`")
    add(
        "--window",
        metavar="TIME",
        help="with a router: how far back to look, as 90s, 10m or 1h, which is the most (default 10m)",
    )
    add_admin_key(parser)
    add(
        "--cache-tokens",
        type=int,
        metavar="N",
        help="with a recording: tokens that each worker can cache (default 400000)",
    )
    add("--json", action="store_true", help="print the whole report as one line of JSON")


def run(args: argparse.Namespace) -> int:
    is_router = args.source.startswith(("http://", "https://"))
    name, value = ("cache-tokens", args.cache_tokens) if is_router else ("window", args.window)
    if value is not None:
        raise InvalidValueError(f"--{name}", value, f"{'a recording' if is_router else 'a router'}, not {args.source}")
    if args.cache_tokens is not None and args.cache_tokens < 1:
        raise InvalidValueError("--cache-tokens", args.cache_tokens, "more than 0")
    if is_router:
        report = json.loads(ask_router(args.source, f"/regret?window={args.window or '10m'}", args.admin_key))
    elif not (path := Path(args.source)).exists():
        raise InvalidValueError("URL|RECORDING", args.source, "a router, as http://127.0.0.1:30000, or a recording")
    else:
        report = _report_recording(path, args.cache_tokens or _CACHE_TOKENS)
    if args.json:
        print(json.dumps(report))
    else:
        with reading(args.source):
            _print_report(report)
    return 0


def _report_recording(path: Path, cache_tokens: int) -> dict[str, Any]:
    """Return the report on a recording, as a router makes it of its requests; workers cache so many tokens each.

    Of a trace that names no worker it says what a cache of that size would have held.
    """
    from kvist.router.regret import Regret
    from kvist.simulate.trace import read_lines

    lines = [
        (line.recording_started_at + (line.timestamp or 0.0) / 1e3, line)
        for _, line in read_lines(path)
        if line.input_length is not None and line.status == 200
    ]
    lines.sort(key=itemgetter(0))
    if not lines:
        raise InvalidValueError("recording", str(path), "a line for each answered request, with its input_length")
    num_workers = len({line.worker for _, line in lines})
    regret = Regret(max_buckets=None, sampling_rate=1.0)  # a few requests are counted exactly
    for at_s, line in lines:
        capacity_blocks = num_workers * cache_tokens // line.tokens_per_block
        regret.add(at_s, [_parse_routed(line, regret.sampling_rate)], capacity_blocks)
    report = regret.report(lines[-1][0], lines[-1][0] - lines[0][0])
    if not any(line.worker for _, line in lines):  # nobody routed these requests, so nothing was lost
        for row in (report["total"], *(row for name in report if name.startswith("by_") for row in report[name])):
            row["lost_tokens"] = {}
        report["losses"], report["costliest_prefixes"] = [], []
    return report


def _parse_routed(line: TraceLine, sampling_rate: float) -> Routed:
    import numpy as np

    from kvist.router.regret import DEFAULT_TENANT, Routed, sample_of

    predicted = line.predicted_cached_tokens or 0
    hashes = np.array([each & (1 << 64) - 1 for each in line.hash_ids or ()], np.uint64)
    return Routed(
        line.model or "",
        line.worker or "",
        line.input_length or 0,
        held_tokens=predicted if line.held_tokens is None else line.held_tokens,
        routed_tokens=predicted + line.in_flight_tokens,
        in_flight_tokens=line.in_flight_tokens,
        held_or_in_flight_tokens=line.held_or_in_flight_tokens,
        reported_tokens=line.cached_tokens,
        is_read=bool(line.hash_ids) or (line.input_length or 0) < (line.block_size or 0),
        is_exact=line.exact_cache,
        identically_rendered_tokens=line.identically_rendered_tokens,
        block_size=line.tokens_per_block,
        sampled=sample_of(hashes, hashes, sampling_rate),
        tenant=line.tenant or DEFAULT_TENANT,
    )


def _print_report(report: dict[str, Any]) -> None:
    from kvist.router.regret import quantile

    total, sample = report["total"], report["sample"]
    prompt = total["prompt_tokens"]
    error = f"± {min(1.0, 2 * sample['standard_error']):.1%}, from a sample of {sample['blocks']:,} blocks"
    steps: Sequence[tuple[str, str]] = (
        ("pooled_cache_tokens", f"one cache as large as all together would have held ({error})"),
        ("held_tokens", "some worker held"),
        ("routed_tokens", f"the chosen worker held, {total['in_flight_tokens']:,} of them still being computed"),
        ("reported_tokens", f"engines found, of the {total['prompt_tokens_with_report']:,} for which they report it"),
    )
    by_tenant = report["by_tenant"] if len(report["by_tenant"]) > 1 else []
    by_worker, evicted = [row for row in report["by_worker"] if row["worker"]], "Evicted blocks"
    if report["by_worker"] and not by_worker:
        steps = ((steps[0][0], f"one cache of --cache-tokens would have held ({error})"),)
        evicted = "Blocks that it would have held"
    wholes = {"reported_tokens": total["prompt_tokens_with_report"]}
    tokens = [(f"{total[name]:,}", percent(total[name], wholes.get(name, prompt)), means) for name, means in steps]
    costliest = [
        (f"{each['lost_tokens']:,}", f"{each['requests']:,}", f"{each['length_tokens']:,}", each["prefix"])
        for each in report["costliest_prefixes"]
    ]
    columns = ("requests", "prompt tokens", "held", "routed", "lost")
    tables: list[tuple[Sequence[str], Sequence[Sequence[str]]]] = [
        (("tokens", "share", "which"), tokens),
        (LOSSES, [loss_row(loss, prompt) for loss in report["losses"]]),
        ((*columns, "tenant"), [(*_summary_cells(row), row["tenant"]) for row in by_tenant]),
        (
            (*columns, "model", "worker"),
            [(*_summary_cells(row), row["model"], row["worker"]) for row in by_worker],
        ),
        (("lost tokens", "requests", "length", "costliest prefixes"), costliest),
    ]
    spans = (
        ("reuse_distance_blocks", "Reuse distance: up to {:,} other blocks in half of all reuses"),
        ("retention_needed_s", f"{evicted} were used again: within {{:,}} s in half of all cases"),
    )
    popularity = (
        "Popularity: the tenth of the blocks that is used most has {10%:.0%} of all uses, half of them {50%:.0%}."
    )
    display(
        f"{total['requests']:,} requests in {report['window_s']:,.0f} s, {prompt:,} prompt tokens, of which",
        *(make_table(columns, rows) for columns, rows in tables if rows),
        *(
            f"{text.format(quantile(counts, 0.5))}, {quantile(counts, 0.9):,} in 90 %."
            for name, text in spans
            if (counts := report[name])
        ),
        *((popularity.format(**sample["share_of_uses_by_top_blocks"]),) if sample["blocks"] else ()),
    )


def _summary_cells(row: dict[str, Any]) -> tuple[str, ...]:
    prompt, lost = row["prompt_tokens"], sum(row["lost_tokens"].values())
    held, routed = percent(row["held_tokens"], prompt), percent(row["routed_tokens"], prompt)
    return f"{row['requests']:,}", f"{prompt:,}", held, routed, f"{lost:,}"


def loss_row(loss: dict[str, Any], num_tokens: int) -> tuple[str, ...]:
    return f"{loss['tokens']:,}", percent(loss["tokens"], num_tokens), loss["cause"], loss["remedy"]


def percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"
