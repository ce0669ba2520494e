"""`kvist replay`: play a recording, or look into it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvist.errors import InvalidValueError

if TYPE_CHECKING:
    from kvist.replay.script import Moment

HELP = "play a recording of event streams, or say what is in it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the recording")
    actions = parser.add_argument_group("what to do").add_mutually_exclusive_group(required=True)
    actions.add_argument(
        "--to",
        action="append",
        metavar="URL",
        help="publish; once for each recorded source, or once with port 0: each source gets a publication of its own",
    )
    actions.add_argument("--into-index", action="store_true", help="play into an index and print what it holds then")
    actions.add_argument("--stats", action="store_true", help="print what is in it")
    _add_selection(parser.add_argument_group("what is meant"))
    _add_pace(parser.add_argument_group("how it is played"))
    parser.add_argument("--block-size", type=int, metavar="TOKENS", help="the index's (default: the recording's first)")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="write a plot beside --stats")
    parser.add_argument("--json", action="store_true", help="print --stats or --into-index as one line of JSON")


def _add_selection(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--worker", action="append", default=[], metavar="NAME", help="only this worker; may be repeated"
    )
    group.add_argument("--since", metavar="TIME", help="seconds from the beginning, Unix time or ISO 8601")
    group.add_argument("--until", metavar="TIME", help="likewise; messages from there on are left out")


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
    """Do what is asked for; return 0."""
    from kvist.cli import _replay_actions as actions
    from kvist.replay.reader import RecordingReader
    from kvist.replay.script import Script, Selection

    _check(args)
    script = Script(
        lambda: RecordingReader(args.file),
        selection=Selection(frozenset(args.worker), _moment("--since", args.since), _moment("--until", args.until)),
        num_rounds=args.loop,
        follows=args.follow,
    )
    if args.to:
        actions.publish(args, script)
    elif args.into_index:
        actions.index(args, script)
    else:
        actions.print_statistics(args, script)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise InvalidValueError where flags do not go together."""
    if args.stats and args.loop != 1:
        raise InvalidValueError("--loop", args.loop, "1 with --stats")
    if args.plot is not None and args.plot.suffix != ".svg":
        raise InvalidValueError("--plot", str(args.plot), "a name that ends in .svg")
    for name in ("delay", "linger"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise InvalidValueError(f"--{name}", getattr(args, name), "0 seconds or more")


def _moment(field: str, text: str | None) -> Moment | None:
    from kvist.replay.script import Moment

    return None if text is None else Moment.parse(field, text)
