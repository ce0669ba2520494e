"""`kvist why`: where the hits of a router's requests went, of one that runs or of a recording."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvist.cli._client import add_admin_key, ask_router
from kvist.cli._terminal import display, make_table
from kvist.errors import InvalidValueError

if TYPE_CHECKING:
    from kvist.router.regret import Routed
    from kvist.simulate.trace import TraceLine

HELP = "say where the hits went: what caches could have spared, and why they did not"

_CACHE_TOKENS = 400_000
LOSSES = ("tokens lost", "share", "why", "what to do")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="URL|RECORDING", help="a router, or what `kvist route --record-requests` wrote")
    add("--window", metavar="TIME", help="of a router: 90s, 10m, 1h at most (default 10m)")
    add_admin_key(parser)
    add("--cache-tokens", type=int, metavar="N", help="of a recording: what each worker caches (default 400000)")
    add("--json", action="store_true", help="print all there is, as one line of JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report; return 0."""
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
        _print_report(report)
    return 0


def _report_recording(path: Path, cache_tokens: int) -> dict[str, Any]:
    """Return the report on a recording, as a router makes it of its requests; workers cache so many tokens each."""
    from kvist.router.regret import Regret
    from kvist.simulate.trace import read_lines

    lines = sorted((line.began + (line.timestamp or 0.0) / 1e3, place, line) for place, line in read_lines(path))
    if not lines:
        raise InvalidValueError("recording", str(path), "a line for each request")
    num_workers = len({line.worker for _, _, line in lines})
    regret = Regret(max_buckets=None)
    for at_s, _, line in lines:
        if line.input_length is not None and line.status == 200:
            regret.add(at_s, [_parse_routed(line)], num_workers * cache_tokens // line.block_size)
    return regret.report(lines[-1][0], lines[-1][0] - lines[0][0])


def _parse_routed(line: TraceLine) -> Routed:
    import numpy as np

    from kvist.router.regret import DEFAULT_TENANT, Routed, sample_of

    predicted, hashes = line.overlap_predicted or 0, np.array(line.hash_ids or (), np.uint64)
    return Routed(
        line.model or "",
        line.worker or "",
        line.input_length or 0,
        held=predicted if line.overlap_held is None else line.overlap_held,
        routed=predicted + line.overlap_in_flight,
        in_flight=line.overlap_in_flight,
        under_way=line.overlap_under_way,
        reported=line.overlap_reported,
        is_read=bool(line.hash_ids) or (line.input_length or 0) < line.block_size,
        is_exact=line.exact,
        alike=line.alike,
        block_size=line.block_size,
        sampled=sample_of(hashes, hashes),
        tenant=line.tenant or DEFAULT_TENANT,
    )


def _print_report(report: dict[str, Any]) -> None:
    from kvist.router.regret import quantile

    total, sample = report["total"], report["sample"]
    prompt = max(1, total["prompt_tokens"])
    error = f"± {2 * sample['standard_error']:.1%}, from a sample of {sample['blocks']:,} blocks"
    steps = (
        ("one_cache", f"one cache as large as all would have held ({error})"),
        ("held", "some worker held"),
        ("routed", f"the chosen worker held, {total['in_flight']:,} of them still being computed"),
        ("reported", f"engines found, of the {total['told_tokens']:,} that they say so of"),
    )
    by_tenant = report["by_tenant"] if len(report["by_tenant"]) > 1 else []
    wholes = {"reported": total["told_tokens"]}
    tokens = [(f"{total[name]:,}", percent(total[name], wholes.get(name, prompt)), means) for name, means in steps]
    costliest = [
        (f"{each['tokens_lost']:,}", f"{each['times']:,}", f"{each['length']:,}", each["prefix"])
        for each in report["costliest_prefixes"]
    ]
    columns = ("requests", "prompt tokens", "held", "routed", "lost")
    tables: list[tuple[Sequence[str], Sequence[Sequence[str]]]] = [
        (("tokens", "share", "which"), tokens),
        (LOSSES, [loss_row(loss, prompt) for loss in report["losses"]]),
        ((*columns, "tenant"), [(*_summary_cells(row), row["tenant"]) for row in by_tenant]),
        ((*columns, "model", "worker"), [(*_summary_cells(row), row["model"], row["worker"]) for row in report["by"]]),
        (("tokens lost", "times", "length", "costliest prefixes"), costliest),
    ]
    spans = (
        ("reuse_distance_blocks", "Between two uses of a block up to {:,} others were used in half of all cases"),
        ("stay_needed_s", "Evicted blocks would have had to stay up to {:,} s in half of all cases"),
    )
    display(
        f"{total['requests']:,} requests in {report['window_s']:,.0f} s, {prompt:,} prompt tokens, of which",
        *(make_table(columns, rows) for columns, rows in tables if rows),
        *(
            f"{text.format(quantile(counts, 0.5))}, {quantile(counts, 0.9):,} in nine of ten."
            for name, text in spans
            if (counts := report[name])
        ),
    )


def _summary_cells(row: dict[str, Any]) -> tuple[str, ...]:
    prompt, lost = row["prompt_tokens"], sum(row["lost"].values())
    held, routed = percent(row["held"], prompt), percent(row["routed"], prompt)
    return f"{row['requests']:,}", f"{prompt:,}", held, routed, f"{lost:,}"


def loss_row(loss: dict[str, Any], num_tokens: int) -> tuple[str, ...]:
    return f"{loss['tokens']:,}", percent(loss["tokens"], num_tokens), loss["cause"], loss["do"]


def percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"
