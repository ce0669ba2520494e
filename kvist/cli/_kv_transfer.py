"""How `kvist serve` takes part in transfers: its flags, its agent and its service."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvist.errors import InvalidValueError

if TYPE_CHECKING:
    import torch

    from kvist.engine.async_engine import AsyncEngine
    from kvist.engine.loading import LoadedEngine
    from kvist.transfer.agents import TransferAgent
    from kvist.transfer.bounce import Bounce
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
        "--kv-transfer-bounce-mib",
        type=int,
        default=0,
        metavar="N",
        help="MiB of each of two regions through which many small pieces go as one write, where that is measured to be "
        "faster (default: 0, off)",
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
    """An agent, a way to make another, and how it wants the engine's memory allocated; None leaves that to torch."""

    agent: TransferAgent
    make_agent: Callable[[str], TransferAgent]
    allocate: Callable[[int], torch.Tensor] | None


def open_agent(args: argparse.Namespace, worker: str) -> Transfers | None:
    """Return the agent that the flags ask for, if any; raises InvalidValueError, or MissingExtraError."""
    if args.kv_transfer is None:
        if args.role != "both":
            raise InvalidValueError("role", args.role, "both, or --kv-transfer to be given as well")
        return None
    host, _, port = args.kv_transfer.removeprefix("tcp://").rpartition(":")
    is_tcp = args.kv_transfer.startswith("tcp://") and port.isdigit()
    if not is_tcp or not host or host in _WILDCARDS:
        raise InvalidValueError("kv_transfer", args.kv_transfer, "tcp://host:port that other workers can reach")
    if not args.kv_transfer_timeout > 0:
        raise InvalidValueError("kv_transfer_timeout", args.kv_transfer_timeout, "more than 0 seconds")
    if args.kv_transfer_bounce_mib < 0:
        raise InvalidValueError("kv_transfer_bounce_mib", args.kv_transfer_bounce_mib, "at least 0 MiB, 0 for off")
    if args.kv_transfer_agent == "nixl":
        from kvist.transfer.agents.nixl import NixlAgent

        make_nixl = partial(NixlAgent, write_timeout_s=args.kv_transfer_timeout)
        return Transfers(make_nixl(worker), make_nixl, None)
    if args.device != "cpu":
        raise InvalidValueError("kv_transfer_agent", "shared_memory", f"nixl: the KV memory is on {args.device}")
    import torch

    from kvist.transfer.agents import SharedMemoryAgent

    make_agent = partial(SharedMemoryAgent, write_timeout_s=args.kv_transfer_timeout)
    agent = make_agent(worker)
    return Transfers(agent, make_agent, lambda size_bytes: torch.from_numpy(agent.allocate(size_bytes)))


def open_service(
    args: argparse.Namespace, model_name: str, transfers: Transfers, loaded: LoadedEngine, engine: AsyncEngine
) -> KvTransferService:
    """Register the engine's memory, and return the service, bound and attached to the engine, but not started."""
    from kvist.engine.handoff import HandoffLimits
    from kvist.transfer.messages import PoolPlace, group_shapes
    from kvist.transfer.service import KvTransferService, make_hello
    from kvist.transfer.sessions import TransferLimits

    agent, pools = transfers.agent, []
    bounce = _open_bounce(args, transfers, loaded)
    for pool in loaded.tensors.pools:
        agent.register(pool.data_ptr(), pool.nbytes, pool.device.index if pool.is_cuda else None)
        pools.append(PoolPlace(pool.data_ptr(), pool[0].nbytes, len(pool)))
    groups = group_shapes(loaded.plan)
    hello = make_hello(model_name, args.block_size, groups, tuple(pools), agent, args.kv_transfer_agent)
    timeout_s = args.kv_transfer_timeout
    limits = TransferLimits(transfer_timeout_s=timeout_s, hold_timeout_s=2 * timeout_s)
    endpoint = args.kv_transfer[:-2] + ":*" if args.kv_transfer.endswith(":0") else args.kv_transfer
    service = KvTransferService(endpoint, agent, hello, loaded.core, engine.submit, limits, bounce)
    loaded.core.attach(service, HandoffLimits(is_fallback_allowed=not args.no_kv_transfer_fallback))
    return service


def _open_bounce(args: argparse.Namespace, transfers: Transfers, loaded: LoadedEngine) -> Bounce:
    """Return a bounce of the size asked for, or of what memory allows, with costs measured here."""
    import torch

    from kvist.transfer.bounce import BounceConfig, NullBounce, RegionBounce
    from kvist.transfer.bounce.calibration import calibrate_agents
    from kvist.transfer.bounce.copier import TensorRegion, TorchCopier, host_region

    config = BounceConfig(args.kv_transfer_bounce_mib)
    if not config.size_mib:
        return NullBounce()
    device = loaded.tensors.device
    is_cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if is_cuda else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    size_bytes = config.region_bytes(free)
    if size_bytes is None:
        expected = f"two regions of 32 MiB or more in half of the {free // 2**20} MiB that are free"
        raise InvalidValueError("kv_transfer_bounce_mib", config.size_mib, expected)

    def allocate() -> TensorRegion:
        if is_cuda:
            return TensorRegion(torch.zeros(size_bytes, dtype=torch.uint8, device=device))
        return host_region(transfers.agent, size_bytes)

    with ExitStack() as exits:
        source, target = (transfers.make_agent(f"{transfers.agent.name}/{end}") for end in ("from", "to"))
        for agent in (source, target):
            exits.callback(agent.close)
        costs = calibrate_agents(source, target)
    return RegionBounce(transfers.agent, TorchCopier(loaded.tensors.pools), allocate, costs, config)
