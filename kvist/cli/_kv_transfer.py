"""How `kvist serve` takes part in transfers: its flags, its agent and its service."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvist.errors import InvalidValueError

if TYPE_CHECKING:
    import torch

    from kvist.engine.async_engine import AsyncEngine
    from kvist.engine.loading import LoadedEngine
    from kvist.transfer.agents import TransferAgent
    from kvist.transfer.service import KvTransferService

ROLES = ("both", "prefill", "decode")
AGENTS = ("shared_memory", "nixl")
_WILDCARDS = ("*", "0.0.0.0", "[::]", "::")


def add_transfer_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--role",
        choices=ROLES,
        default="both",
        help="what routers use this worker for, beside --kv-transfer (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-transfer",
        metavar="URL",
        help="tcp://host:port where other workers fetch prompts' KV, an address they can reach; port 0: a free one",
    )
    parser.add_argument(
        "--kv-transfer-agent",
        choices=AGENTS,
        default="shared_memory",
        help="what moves the bytes: shared_memory within a host, nixl between hosts (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-transfer-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="when a transfer has failed; prompts are held twice as long (default: %(default)s)",
    )
    parser.add_argument(
        "--no-kv-transfer-fallback",
        action="store_true",
        help="answer with an error when a prompt cannot be fetched, where it would be computed here",
    )


class Transfers(NamedTuple):
    """An agent, and how the engine's memory is allocated so that it can be reached; None leaves that to torch."""

    agent: TransferAgent
    allocate: Callable[[int], torch.Tensor] | None


def open_agent(args: argparse.Namespace, worker: str) -> Transfers | None:
    """Return the agent that the flags ask for, if any; raises InvalidValueError, or MissingExtraError."""
    if args.kv_transfer is None:
        if args.role != "both":
            raise InvalidValueError("role", args.role, "both, or --kv-transfer to be given as well")
        return None
    host = args.kv_transfer.removeprefix("tcp://").rpartition(":")[0]
    if not args.kv_transfer.startswith("tcp://") or not host or host in _WILDCARDS:
        raise InvalidValueError("kv_transfer", args.kv_transfer, "tcp://host:port that other workers can reach")
    is_on_cpu = args.device == "cpu"
    if args.kv_transfer_agent == "nixl":
        from kvist.transfer.agents.nixl import NixlAgent

        return Transfers(NixlAgent(worker, write_timeout_s=args.kv_transfer_timeout), None)
    if not is_on_cpu:
        raise InvalidValueError("kv_transfer_agent", "shared_memory", f"nixl: the KV memory is on {args.device}")
    import torch

    from kvist.transfer.agents import SharedMemoryAgent

    agent = SharedMemoryAgent(worker, write_timeout_s=args.kv_transfer_timeout)
    return Transfers(agent, lambda size_bytes: torch.from_numpy(agent.allocate(size_bytes)))


def open_service(
    args: argparse.Namespace, model_name: str, agent: TransferAgent, loaded: LoadedEngine, engine: AsyncEngine
) -> KvTransferService:
    """Register the engine's memory, and return the service, bound and attached to the engine, but not started."""
    from kvist.engine.handoff import HandoffLimits
    from kvist.transfer.messages import PoolPlace, group_shapes
    from kvist.transfer.service import KvTransferService, make_hello
    from kvist.transfer.sessions import TransferLimits

    pools = []
    for pool in loaded.tensors.pools:
        agent.register(pool.data_ptr(), pool.nbytes, pool.device.index if pool.is_cuda else None)
        pools.append(PoolPlace(pool.data_ptr(), pool[0].nbytes, len(pool)))
    groups = group_shapes(loaded.plan)
    hello = make_hello(model_name, args.block_size, groups, tuple(pools), agent, args.kv_transfer_agent)
    timeout_s = args.kv_transfer_timeout
    limits = TransferLimits(transfer_timeout_s=timeout_s, hold_timeout_s=2 * timeout_s)
    endpoint = args.kv_transfer[:-2] + ":*" if args.kv_transfer.endswith(":0") else args.kv_transfer
    service = KvTransferService(endpoint, agent, loaded.plan.groups, hello, loaded.core, engine.submit, limits)
    loaded.core.attach(service, HandoffLimits(is_fallback_allowed=not args.no_kv_transfer_fallback))
    return service
