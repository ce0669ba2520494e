"""The `kvist` command: one small module a subcommand, imported only when it is called.

A module has `HELP` (a line), `add_arguments(parser)` and `run(args) -> exit code`, and imports what is heavy inside
`run`. This is the only place where control plane and engine meet, and where argv and the environment are read.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvist import __version__
from kvist.errors import InvalidValueError, KvistError, MissingExtraError

COMMANDS = ("up", "route", "index", "serve", "publish", "record", "replay", "simulate", "why", "top", "compile", "epp")

_GC_THRESHOLD = 10_000
"""What is imported stays, and requests make no reference cycles: at Python's 700 the collector takes a seventh of the
CPU of a worker's start, and 2 to 6 % of a router's CPU, 50 ms at a time."""

# What each optional dependency comes with, for a command whose import failed.
_MODULES_OF_EXTRA = {
    "router": "numba llvmlite tokenizers jinja2 prometheus_client rich",
    "engine": "torch safetensors transformers",
    "gpu": "triton",
    "tracing": "opentelemetry",
    "replay": "mcap zstandard",
    "charts": "matplotlib",
    "epp": "grpc grpc_health grpc_reflection envoy google",
}
_EXTRA_OF_MODULE = {name: extra for extra, names in _MODULES_OF_EXTRA.items() for name in names.split()}


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage of a hundred flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 done, 1 failed, 2 the arguments are wrong or an extra is missing, 130 interrupted before it was done.
    """
    try:
        return _run(argv)
    except KeyboardInterrupt:  # also while a command is imported
        return 130


def _run(argv: Sequence[str] | None) -> int:
    if argv is None:  # then this process is the command's own
        argv = sys.argv[1:]
        gc.set_threshold(_GC_THRESHOLD)
    if os.getpid() == 1:  # of a container: the kernel sends such a process no signal that it does not handle
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    anywhere = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    levels = ("debug", "info", "warning", "error")
    anywhere.add_argument("--log-level", choices=levels, help="least severe log level on stderr (default: info)")
    description = "Prefix-aware routing for fleets of LLM engines."
    parser = _Parser(prog="kvist", description=description, parents=[anywhere])
    parser.add_argument("--version", action="version", version=f"kvist {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    named = [word for word in argv if word in COMMANDS][:1]
    for name in named or COMMANDS:  # the named command alone is imported; all of them only to list them
        module = importlib.import_module(f"kvist.cli.{name}")
        subparser = subparsers.add_parser(name, help=module.HELP, description=module.HELP, parents=[anywhere])
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        subparser.error(f"unrecognized arguments: {' '.join(unknown)}")
    level, line = getattr(args, "log_level", "info").upper(), "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level, format=line, stream=sys.stderr)
    try:
        code = int(args.run(args))
        if sys.stdout is not None:
            sys.stdout.flush()  # or a failure to write would show only when the interpreter ends
        return code
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF_MODULE.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return _fail(args.command, MissingExtraError(extra, str(error.name)))
    except (KvistError, OSError) as error:
        return _fail(args.command, error)


def _fail(command: str, error: Exception) -> int:
    code = 2 if isinstance(error, InvalidValueError | MissingExtraError) else 1
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest cannot be written
        if isinstance(error, BrokenPipeError):  # the reader has closed the pipe, as `head` does
            return code
    print(f"kvist {command}: error: {error}", file=sys.stderr)
    return code
