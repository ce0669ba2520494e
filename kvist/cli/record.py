"""`kvist record`: write down what event streams say."""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvist.cli._terminal import run_until_signalled
from kvist.errors import InvalidValueError

if TYPE_CHECKING:
    from kvist.replay.writer import RecordingWriter

HELP = "record event streams to a file"

_MAX_SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "a stream to record, canonical or an engine's own (?engine=sglang if not vLLM); may be repeated"
    add("--from", dest="sources", action="append", required=True, metavar="[NAME=]URL", help=text)
    add("--to", type=Path, required=True, metavar="FILE", help="the recording, such as fleet.mcap")
    add("--append", action="store_true", help="continue an existing recording, in a new file beside it")
    text = "start a new file, fleet.1.mcap and so on, beyond this size, such as 512M"
    add("--rotate-bytes", metavar="SIZE", help=text)
    add("--duration", type=float, metavar="SECONDS", help="stop after this time (default: at SIGINT or SIGTERM)")


def run(args: argparse.Namespace) -> int:
    from kvist.replay import RecordingError, RecordingReader
    from kvist.replay.recorder import Recorder, parse_sources
    from kvist.replay.writer import RecordingWriter

    if args.duration is not None and not 0 < args.duration < float("inf"):
        raise InvalidValueError("--duration", args.duration, "a positive number of seconds")
    specs = parse_sources(args.sources)
    sources, rotate_bytes = [spec.source for spec in specs], _parse_size(args.rotate_bytes)
    with RecordingWriter(args.to, sources, appends=args.append, rotate_bytes=rotate_bytes) as writer:
        recorder = Recorder(specs, writer)
        if writer.earlier is not None:
            with RecordingReader(writer.earlier) as reader:
                try:
                    recorder.skip(reader)
                except RecordingError as error:
                    text = "the existing recording is damaged, later messages may be recorded twice"
                    print(f"kvist record: {text}: {error}", flush=True)

        def progress() -> tuple[str, float, None]:
            return f"{_totals(writer)}, {sum(report.num_gaps for report in recorder.reports())} gaps", 0, None

        ready_line = f"kvist record: recording {len(args.sources)} sources to {args.to}"
        asyncio.run(run_until_signalled(recorder.run(), ready_line, progress, args.duration))
    for report in recorder.reports():
        print(
            f"kvist record: {report.name}: {report.num_messages} messages, {report.num_connects} connections, "
            f"{report.num_gaps} gaps, {report.num_duplicates} duplicates, {report.num_restarts} restarts, "
            f"{report.num_malformed} malformed; "
            f"{report.num_snapshots} snapshots and {report.num_recovered} messages asked for and recorded"
            + (f"; partial: {_abbreviate(report.partial)}" if report.partial else "")
            + (f"; not received: {report.problem}" if report.problem else "")
        )
    print(f"kvist record: {_totals(writer)} in {writer.num_parts} files at {args.to}", flush=True)
    return 0


def _totals(writer: RecordingWriter) -> str:
    return (
        f"{writer.num_messages} messages, {writer.num_payload_bytes} bytes of payload, "
        f"{writer.num_written_bytes} bytes written"
    )


def _abbreviate(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more


def _parse_size(text: str | None) -> int | None:
    """Return a size as a number of bytes: digits, and perhaps k, M or G behind them."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]+)([kKmMgG]?)", text)
    if match is None:
        raise InvalidValueError("--rotate-bytes", text, "a number of bytes, such as 500000, 64M or 2G")
    return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]
