"""`kvist replay`: play a recording, look into it, or turn it into another form."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvist.errors import InvalidValueError

if TYPE_CHECKING:
    from kvist.replay.script import Moment

HELP = "play a recording of event streams, or say what is in it"

_ACTIONS = ("to", "into_index", "stats", "to_file", "to_jsonl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the recording")
    parser.add_argument("--from-jsonl", type=Path, metavar="FILE", help="read JSON lines instead of a recording")
    parser.add_argument(
        "--engine", choices=("vllm", "sglang"), default="vllm", help="whose batches they are, if the lines do not say"
    )
    actions = parser.add_argument_group("what to do: one of")
    actions.add_argument(
        "--to",
        action="append",
        metavar="URL",
        help="publish; once for each recorded source, or once with port 0: each source gets a publication of its own",
    )
    actions.add_argument("--into-index", action="store_true", help="play into an index and print what it holds then")
    actions.add_argument("--stats", action="store_true", help="print what is in it, with a plot")
    actions.add_argument("--to-file", type=Path, metavar="FILE", help="write a recording of what is selected")
    actions.add_argument("--to-jsonl", metavar="FILE", help="write JSON lines (- for stdout)")
    _add_selection(parser.add_argument_group("what is meant"))
    _add_pace(parser.add_argument_group("how it is played"))
    parser.add_argument("--block-size", type=int, metavar="TOKENS", help="the index's (default: the recording's first)")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="write the plot of --stats to a file")
    parser.add_argument("--json", action="store_true", help="print --stats or --into-index as one line of JSON")
    parser.add_argument(
        "--jsonl-form",
        choices=("message", "batch"),
        default="message",
        help='everything that was recorded, or {"seq": n, "batch": [ts, events, rank]} (default %(default)s)',
    )


def _add_selection(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--worker", action="append", default=[], metavar="NAME", help="only this worker; may be repeated"
    )
    group.add_argument("--since", metavar="TIME", help="seconds from the beginning, Unix time or ISO 8601")
    group.add_argument("--until", metavar="TIME", help="likewise; messages from there on are left out")
    group.add_argument(
        "--event",
        action="append",
        choices=("stored", "removed", "cleared", "heartbeat"),
        help="only events of this kind; may be repeated",
    )
    group.add_argument(
        "--map-worker", action="append", default=[], metavar="OLD=NEW", help="call a worker by another name"
    )


def _add_pace(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--speed", type=float, default=1.0, metavar="N", help="N times as fast as recorded (default 1)")
    group.add_argument("--as-fast-as-possible", action="store_true", help="without waiting")
    group.add_argument("--loop", type=int, default=1, metavar="N", help="play it N times over")
    group.add_argument("--follow", action="store_true", help="go on while the recording is being written")
    group.add_argument(
        "--delay", type=float, default=1.0, metavar="SECONDS", help="wait for subscribers first (default %(default)s)"
    )
    group.add_argument(
        "--linger",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="answer replay requests for so long after the end, and after the last of them (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Do one of the actions; return 0."""
    from kvist.cli import _replay_actions as actions
    from kvist.replay.rewriting import Rewriter
    from kvist.replay.script import Script, Selection

    _check(args)
    script = Script(
        lambda: actions.open_reader(args),
        selection=Selection(frozenset(args.worker), _moment("--since", args.since), _moment("--until", args.until)),
        rewriter=Rewriter(
            kinds=None if args.event is None else frozenset(args.event), names=_names(args), num_rounds=args.loop
        ),
        num_rounds=args.loop,
        follows=args.follow,
    )
    if args.to:
        actions.publish(args, script)
    elif args.into_index:
        actions.index(args, script, _names(args))
    elif args.stats:
        actions.print_statistics(args, script)
    elif args.to_file:
        actions.write_recording(args, script)
    else:
        actions.write_jsonl(args, script)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise InvalidValueError where flags do not go together."""
    given = ["--" + name.replace("_", "-") for name in _ACTIONS if getattr(args, name)]
    if len(given) != 1:
        raise InvalidValueError("what to do", " ".join(given) or None, "one of --to, --into-index, --stats, …")
    if (args.file is None) == (args.from_jsonl is None):
        raise InvalidValueError("FILE", args.file and str(args.file), "a recording, or --from-jsonl")
    if (args.to_file or args.to_jsonl or args.stats) and args.loop != 1:
        raise InvalidValueError("--loop", args.loop, f"1 with {given[0]}")
    if args.plot is not None and args.plot.suffix != ".svg":
        raise InvalidValueError("--plot", str(args.plot), "a name that ends in .svg")
    for name in ("delay", "linger"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise InvalidValueError(f"--{name}", getattr(args, name), "0 seconds or more")


def _names(args: argparse.Namespace) -> dict[str, str]:
    """Return what --map-worker says."""
    mapped: dict[str, str] = {}
    for text in args.map_worker:
        old, separator, new = text.partition("=")
        if not separator or not old or not new:
            raise InvalidValueError("--map-worker", text, "OLD=NEW")
        mapped[old] = new
    return mapped


def _moment(field: str, text: str | None) -> Moment | None:
    from kvist.replay.script import Moment

    return None if text is None else Moment.parse(field, text)
