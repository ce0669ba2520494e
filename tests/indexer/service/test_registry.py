"""Which namespaces there are: each is kept while somebody feeds it."""

from __future__ import annotations

import asyncio

import pytest

from kvist.indexer.service.registry import Namespace, Registry, Stream

NAMESPACE = Namespace("m", "g")


@pytest.mark.parametrize("num_turns", range(4))
async def test_a_client_that_leaves_while_it_registers_leaves_nothing_behind(num_turns: int) -> None:
    stream = Stream("tcp://127.0.0.1:9", "tcp://127.0.0.1:9")
    async with asyncio.timeout(30), Registry() as registry:
        registering = asyncio.create_task(registry.register(NAMESPACE, 16, 1, 0, stream))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        registering.cancel()
        await asyncio.wait([registering])
        assert [member.namespace for member in registry] == [NAMESPACE] * (not registering.cancelled())
        await registry.register(NAMESPACE, 32 if registering.cancelled() else 16, 2, 0, stream)
