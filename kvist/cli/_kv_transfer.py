"""How `kvist serve` takes part in transfers: its flags, and what they come to."""

from __future__ import annotations

import argparse
import re
import socket
from dataclasses import dataclass

from kvist.errors import InvalidValueError

_WILDCARDS = ("*", "0.0.0.0", "[::]", "::")
_MAX_TIMEOUT_S = 86_400
_MAX_PORT = 65_535

# What the flags are that say something with --kv-transfer alone, where they are not given.
_UNSET: dict[str, object] = {
    "role": "both",
    "kv_transfer_agent": "shared_memory",
    "kv_transfer_bounce_mib": 0,
    "kv_transfer_timeout": 30.0,
    "no_kv_transfer_fallback": False,
}


def add_transfer_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(**_UNSET)
    parser.add_argument(
        "--role",
        choices=("both", "prefill", "decode"),
        help="what routers use this worker for, beside --kv-transfer (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-transfer",
        metavar="URL",
        help="tcp://host:port where other workers fetch prompts' KV, an address they can reach; port 0: a free one",
    )
    parser.add_argument(
        "--kv-transfer-agent",
        choices=("shared_memory", "nixl"),
        help="what moves the bytes: shared_memory within a host, nixl between hosts (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-transfer-bounce-mib",
        type=int,
        metavar="N",
        help="MiB of each of two regions through which thousands of small pieces go as one write (default: 0, off)",
    )
    parser.add_argument(
        "--kv-transfer-timeout",
        type=float,
        metavar="S",
        help="when a transfer has failed; prompts are held twice as long (default: %(default)s)",
    )
    parser.add_argument(
        "--no-kv-transfer-fallback",
        action="store_true",
        help="answer with an error when a prompt cannot be fetched, where it would be computed here",
    )


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """What the flags come to, for every rank; `worker` is a name that no other process has, for the agents' names."""

    endpoint: str
    agent: str
    timeout_s: float
    bounce_mib: int
    is_fallback_allowed: bool
    worker: str
    model_name: str
    block_size: int
    num_ranks: int


def read_transfer_settings(args: argparse.Namespace, worker: str, model_name: str) -> TransferSettings | None:
    """Return what the flags ask for, None for no transfers; raises InvalidValueError for what cannot work."""
    if args.kv_transfer is None:
        for field, unset in _UNSET.items():
            if getattr(args, field) != unset:
                raise InvalidValueError(field, getattr(args, field), f"{unset}, or --kv-transfer to be given as well")
        return None
    _check_endpoint(args.kv_transfer)
    if not 0 < args.kv_transfer_timeout <= _MAX_TIMEOUT_S:
        expected = f"more than 0 and at most {_MAX_TIMEOUT_S} seconds"
        raise InvalidValueError("kv_transfer_timeout", args.kv_transfer_timeout, expected)
    if args.kv_transfer_bounce_mib < 0:
        raise InvalidValueError("kv_transfer_bounce_mib", args.kv_transfer_bounce_mib, "at least 0 MiB, 0 for off")
    if args.kv_transfer_agent == "shared_memory" and args.device != "cpu":
        raise InvalidValueError("kv_transfer_agent", "shared_memory", f"nixl: the KV memory is on {args.device}")
    return TransferSettings(
        endpoint=args.kv_transfer,
        agent=args.kv_transfer_agent,
        timeout_s=args.kv_transfer_timeout,
        bounce_mib=args.kv_transfer_bounce_mib,
        is_fallback_allowed=not args.no_kv_transfer_fallback,
        worker=worker,
        model_name=model_name,
        block_size=args.block_size,
        num_ranks=args.tensor_parallel_size,
    )


def _check_endpoint(endpoint: str) -> None:
    """Raise InvalidValueError for an address that cannot be bound, or that no other worker could reach."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_tcp = endpoint.startswith("tcp://") and re.fullmatch(r"[0-9]{1,5}", port) is not None
    if not is_tcp or not host or host in _WILDCARDS:
        raise InvalidValueError("kv_transfer", endpoint, "tcp://host:port that other workers can reach")
    if int(port) > _MAX_PORT:  # getaddrinfo takes it for another one
        raise InvalidValueError("kv_transfer", endpoint, f"a port of at most {_MAX_PORT}")
    try:
        socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise InvalidValueError("kv_transfer", endpoint, f"a host with an IPv4 address ({error})") from None
