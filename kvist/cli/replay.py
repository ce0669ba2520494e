"""`kvist replay`: play a recording, or look into it."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from kvist.cli._terminal import write_output
from kvist.errors import InvalidValueError

HELP = "replay a recording of event streams, or analyse it"

_ACTIONS_OF = {
    **dict.fromkeys(("speed", "as-fast-as-possible", "delay", "linger"), "to"),
    **dict.fromkeys(("beside", "port"), "ui"),
    **dict.fromkeys(("prompt", "model-path"), "at"),
    "loop": "to into_index",
    "plot": "stats",
    "json": "into_index stats at diff",
}
"""The actions that each of these flags belongs to; the others ignore it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="the recording")
    actions = parser.add_argument_group("actions, one of").add_mutually_exclusive_group(required=True)
    text = "publish at this endpoint; repeat it for each recorded source, or give it once with port 0"
    actions.add_argument("--to", action="append", metavar="URL", help=text)
    actions.add_argument(
        "--into-index", action="store_true", help="replay into an index and print what it holds at the end"
    )
    actions.add_argument("--stats", action="store_true", help="print counts of messages, events and blocks")
    actions.add_argument(
        "--at", metavar="TIME", help="print which ranks held the --prompt at this time, in the form of --until"
    )
    actions.add_argument(
        "--diff",
        metavar="OTHER",
        help="compare the blocks held at the end with a recording, a state file or a running `kvist index` (URL); "
        "exit code 1 if they differ",
    )
    actions.add_argument("--ui", action="store_true", help="show in a browser which ranks held what over time")
    add_selection = parser.add_argument_group("selection").add_argument
    text = "only this worker; may be repeated"
    add_selection("--worker", action="append", default=[], metavar="NAME", help=text)
    add_selection(
        "--since", metavar="TIME", help="from this time on: seconds from the beginning, Unix time or ISO 8601"
    )
    add_selection("--until", metavar="TIME", help="up to this time, exclusive; same forms")
    pace = parser.add_argument_group("pace")
    speeds = pace.add_mutually_exclusive_group()
    speeds.add_argument("--speed", type=float, default=1.0, metavar="N", help="N times as fast as recorded (default 1)")
    speeds.add_argument("--as-fast-as-possible", action="store_true", help="do not wait between messages")
    pace.add_argument("--loop", type=int, default=1, metavar="N", help="play it N times (default 1)")
    text = "wait this long for subscribers before the first message (default %(default)s)"
    pace.add_argument("--delay", type=float, default=1.0, metavar="SECONDS", help=text)
    text = "answer replay requests until none has come for this long after the end (default %(default)s)"
    pace.add_argument("--linger", type=float, default=10.0, metavar="SECONDS", help=text)
    add("--beside", type=Path, metavar="OTHER", help="with --ui: another recording to show beside it")
    add("--port", type=int, default=0, metavar="PORT", help="with --ui: port on 127.0.0.1 (default: any free one)")
    add("--prompt", type=Path, metavar="FILE", help='with --at: a request body in JSON, or {"token_ids": [...]}')
    add("--model-path", metavar="DIR", help="with --at: directory of the model's tokeniser, for prompts of text")
    add("--plot", type=Path, metavar="FILE.svg", help="with --stats: write a plot")
    add("--json", action="store_true", help="print the result as lines of JSON")


def run(args: argparse.Namespace) -> int:
    from kvist.cli import _replay_actions as actions
    from kvist.replay.script import Moment, Script, Selection

    _check(args)
    flags = (("--since", args.since), ("--at" if args.at else "--until", args.at or args.until))
    since, until = (None if text is None else Moment.parse(flag, text) for flag, text in flags)
    selection = Selection(frozenset(args.worker), since, until)
    script = Script(args.file, selection=selection, num_rounds=args.loop)
    if args.diff is not None:
        return actions.compare(args, script)
    asked = {"to": actions.publish, "into_index": actions.index, "at": actions.print_holders, "ui": actions.show_page}
    action = next((action for name, action in asked.items() if getattr(args, name)), actions.print_statistics)
    action(args, script)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise InvalidValueError for flags that cannot be combined, and for values that are not allowed."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for flag, actions in _ACTIONS_OF.items():
        name = flag.replace("-", "_")
        value = getattr(args, name)
        if value != parser.get_default(name) and not any(getattr(args, each) for each in actions.split()):
            expected = f"one of {', '.join(f'--{each}'.replace('_', '-') for each in actions.split())} with it"
            raise InvalidValueError(f"--{flag}", value if isinstance(value, int | float) else str(value), expected)
    if args.plot is not None:
        import_module("matplotlib")  # or it would be missed when all is read
        if args.plot.suffix != ".svg":
            raise InvalidValueError("--plot", str(args.plot), "a name that ends in .svg")
        write_output("--plot", args.plot, None)
    if args.at is not None and (args.prompt is None or args.until):
        raise InvalidValueError("--at", args.at, "a time, with --prompt and without --until")
    if not 0 <= args.port <= 65535:
        raise InvalidValueError("--port", args.port, "0 to 65535")
    for name in ("delay", "linger"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise InvalidValueError(f"--{name}", getattr(args, name), "0 seconds or more")
