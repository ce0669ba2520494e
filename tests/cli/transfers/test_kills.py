"""A worker killed in each state of a transfer: its peer says why, keeps nothing, and serves the next request."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

pytestmark = [pytest.mark.xdist_group("transfer kills"), pytest.mark.asyncio(loop_scope="module")]

BLOCK_SIZE, TOKEN_BYTES = 4, 1 << 20
SIZES = ("--block-size", str(BLOCK_SIZE), "--num-blocks", "48", "--max-model-len", "128")
BOUNCE = ("--kv-transfer-bounce-mib", "64")
PATIENT_S, HASTY_S = 30.0, 5.0
SHORT, LONG = 8, 64  # tokens; the copy of a long prompt's KV takes sixteen steps
GONE = r"rank 0 at tcp://127\.0\.0\.1:\d+ is gone"


@dataclass
class Scene:
    """A worker that holds prompts and one that fetches them, and another beside them that nothing happens to."""

    source: Any
    target: Any
    other: Any
    agent: str
    scatter_gate: Path
    prompt: list[int]
    params: dict[str, Any] = field(default_factory=dict)
    asking: asyncio.Task[httpx.Response] | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.prompt) * TOKEN_BYTES

    @property
    def num_blocks(self) -> int:
        return len(self.prompt) // BLOCK_SIZE

    async def hold(self) -> None:
        """Have the prompt computed, and held."""
        self.params = await self.source.prefill(self.prompt)

    def ask(self) -> None:
        """Send the client's request to the worker that decodes."""
        body = {"prompt": self.prompt, "max_tokens": 4, "kv_transfer_params": self.params}
        self.asking = asyncio.create_task(self.target.post(body))

    async def answer(self) -> str:
        assert self.asking is not None
        answer = await self.asking
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text


def make_prompt(count: int, seed: int) -> list[int]:
    return [3 + (seed * 37 + i * i) % 1999 for i in range(count)]


# How a transfer gets into each of its states, for certain, and how that is known.


async def held(scene: Scene) -> None:
    """P holds the prompt, and nobody has asked for it."""
    await scene.hold()
    counts = await scene.source.metrics()
    assert (counts["engine_prompts_held"], counts["engine_kv_blocks_used"]) == (1, scene.num_blocks)


async def first(scene: Scene) -> None:
    """D has asked P, to which it has never spoken before, and P does not run."""
    await scene.hold()
    await scene.source.stop()
    scene.ask()
    await under_way(scene)
    assert await scene.target.metric("engine_prompts_fetched") == 0


async def greeted(scene: Scene) -> None:
    """P, which has answered D before, holds the prompt and does not run."""
    greeting = make_prompt(BLOCK_SIZE, 1)
    params = await scene.source.prefill(greeting)
    await scene.target.text({"prompt": greeting, "max_tokens": 1, "kv_transfer_params": params})
    await scene.hold()
    await scene.source.stop()
    assert scene.source.unread_bytes() == 0


async def asked(scene: Scene) -> None:
    """D, which P has answered before, has asked for the prompt: that lies in the socket of P, which does not run."""
    await greeted(scene)
    written = scene.target.shared_bytes()
    scene.ask()
    await under_way(scene)
    assert await scene.target.metric("engine_prompts_fetched") == 1
    assert scene.target.shared_bytes() == written


async def under_way(scene: Scene) -> None:
    """D waits for P, which does not run, and its message is out."""
    await scene.target.reaches("engine_requests_receiving", 1)
    while not scene.source.unread_bytes():
        await scene.target.metrics()
    counts = await scene.target.metrics()
    assert scene.source.is_stopped
    assert counts["engine_requests_receiving"] == 1
    assert counts["engine_kv_blocks_used"] == scene.num_blocks
    assert counts["transfer_bounce_used_bytes"] in (0, scene.num_bytes)


async def copying(scene: Scene) -> None:
    """P is amid the copy: some of D's memory has been written, and not all."""
    await asked(scene)
    before = scene.target.shared_bytes()
    if scene.agent == "nixl":  # over TCP, which needs D to take the bytes out of its socket
        await scene.target.stop()
        scene.source.resume()
        await scene.source.reaches("transfer_writing", 1)
        assert await scene.source.metric("engine_prompts_sent") == 1, "more than the greeting"
    else:
        scene.source.resume()
        await scene.source.stops()
        assert before < scene.target.shared_bytes() < before + scene.num_bytes
        assert await scene.target.metric("engine_requests_receiving") == 1


async def reported(scene: Scene) -> None:
    """P has written all and has reported, which D, as it does not run, has not heard."""
    await asked(scene)
    await scene.target.stop()
    scene.source.resume()
    await scene.source.reaches("engine_prompts_sent", 2)
    await scene.source.is_idle()
    assert scene.target.is_stopped


async def scattering(scene: Scene) -> None:
    """P has written all in one piece and has reported, and D is about to copy that into its blocks."""
    await scene.hold()
    scene.ask()
    while "scattering" not in scene.target.log.read_text():
        await scene.target.metrics()
    assert await scene.source.metric("transfer_bounced_bytes") == scene.num_bytes
    counts = await scene.target.metrics()
    assert (counts["engine_requests_receiving"], counts["transfer_bounce_used_bytes"]) == (1, scene.num_bytes)


async def quarantined(scene: Scene) -> None:
    """D has given up: P, which does not run, would write as soon as it did."""
    await greeted(scene)
    scene.ask()
    await scene.answer()
    counts = await scene.target.metrics()
    assert counts["engine_fetches_abandoned"] == 1
    assert counts["engine_kv_blocks_used"] == scene.num_blocks
    assert counts["transfer_quarantined_bytes"] == counts["transfer_bounce_quarantined_bytes"] == scene.num_bytes


@dataclass(frozen=True)
class State:
    """How a state is reached, and why D computes the prompt itself when P ends in it, if it has to."""

    reach: Callable[[Scene], Awaitable[None]]
    reason: str | None
    num_tokens: int = SHORT
    is_bounced: bool = True


STATES = {
    "held": State(held, GONE),
    "asked first": State(first, GONE),
    "asked": State(asked, GONE),
    "copying": State(copying, GONE, LONG, is_bounced=False),
    "copying one piece": State(copying, GONE, LONG),
    "reported": State(reported, None),
    "scattering": State(scattering, None),
    "quarantined": State(quarantined, f"no completion within {HASTY_S:g} s"),
}
# All with shared memory; with NIXL that which differs with it, and the others when there is time.
CASES = [
    *(pytest.param("shared_memory", name) for name in STATES),
    *(pytest.param("nixl", name, marks=[] if name == "copying" else pytest.mark.slow) for name in STATES),
]


@pytest.fixture(scope="module")
def agent(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "nixl":
        pytest.importorskip("nixl", reason="the extra nixl is not installed")
    return name


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(agent: str, serve: Callable[..., Any], much_kv: Path) -> AsyncIterator[Any]:
    async with serve(much_kv, *SIZES, *BOUNCE, "--kv-transfer-agent", agent, is_bounced=True) as worker:
        yield worker


@pytest.fixture
def set_scene(agent: str, other: Any, serve: Callable[..., Any], much_kv: Path, tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def set_(
        name: str, source_timeout_s: float = PATIENT_S, target_timeout_s: float = PATIENT_S
    ) -> AsyncIterator[Scene]:
        state, gate = STATES[name], tmp_path / "gate"
        os.mkfifo(gate)
        flags = (*SIZES, *(BOUNCE if state.is_bounced else ()), "--kv-transfer-agent", agent, "--kv-transfer-timeout")
        options = {
            "is_bounced": state.is_bounced,
            "environment": {"UCX_TLS": "tcp"} if state.reach is copying else {},
        }
        stopping = {"stops_amid_copy": state.reach is copying}
        held_up = {"scatter_gate": gate} if state.reach is scattering else {}
        async with AsyncExitStack() as exits:
            source, target = await asyncio.gather(
                exits.enter_async_context(serve(much_kv, *flags, str(source_timeout_s), **options, **stopping)),
                exits.enter_async_context(serve(much_kv, *flags, str(target_timeout_s), **options, **held_up)),
            )
            yield Scene(source, target, other, agent, gate, make_prompt(state.num_tokens, len(name)))

    return set_


@pytest.mark.parametrize(("agent", "name"), CASES, indirect=["agent"], scope="module")
async def test_when_the_sender_is_killed_the_receiver_answers_all_the_same(
    name: str, set_scene: Callable[..., Any]
) -> None:
    state = STATES[name]
    timeout_s = HASTY_S if state.reach is quarantined else PATIENT_S
    async with set_scene(name, target_timeout_s=timeout_s) as scene:
        await state.reach(scene)
        await scene.source.kill()
        if scene.target.is_stopped:
            scene.target.resume()
        if scene.asking is None:
            scene.ask()
        if state.reach is scattering:
            assert await scene.target.metric("engine_requests_receiving") == 1
            scene.scatter_gate.write_bytes(b"")
        text = await scene.answer()
        await scene.target.is_idle()
        reasons = scene.target.failures()
        assert await scene.target.metric("engine_fallbacks") == len(reasons)
        if state.reason is None:
            assert reasons == []
        else:
            assert len(reasons) == 1
            assert re.fullmatch(state.reason, reasons[0])
        assert text == await scene.other.text({"prompt": scene.prompt, "max_tokens": 4})
        await serves_the_next(scene.other, scene.target)


@pytest.mark.parametrize(("agent", "name"), CASES, indirect=["agent"], scope="module")
async def test_when_the_receiver_is_killed_the_sender_frees_what_it_held(
    name: str, set_scene: Callable[..., Any]
) -> None:
    state = STATES[name]
    # Nobody has asked, or one that is gone before it could be answered: it waits for the end of its hold.
    source_s = HASTY_S if state.reach in (held, first) else PATIENT_S
    target_s = HASTY_S if state.reach is quarantined else PATIENT_S
    async with set_scene(name, source_s, target_s) as scene:
        await state.reach(scene)
        await scene.target.kill()
        if scene.source.is_stopped:
            scene.source.resume()
        if scene.asking is not None and state.reach is not quarantined:
            with pytest.raises(httpx.HTTPError):
                await scene.asking
        await scene.source.is_idle()
        await serves_the_next(scene.source, scene.other)


@pytest.mark.parametrize("agent", ["nixl"], indirect=True, scope="module")
@pytest.mark.parametrize("ending", ["it goes on", pytest.param("it is killed", marks=pytest.mark.slow)])
async def test_a_receiver_that_hangs_amid_the_copy_keeps_the_sender_waiting_until_it_goes_on_or_dies(
    ending: str, set_scene: Callable[..., Any]
) -> None:
    async with set_scene("copying", source_timeout_s=HASTY_S) as scene:
        await copying(scene)
        while "kv write is late or has failed" not in scene.source.log.read_text():
            await scene.source.metrics()
        assert await scene.source.metric("transfer_writing") == 1
        assert await scene.source.metric("engine_kv_blocks_used") == scene.num_blocks
        assert scene.asking is not None
        if ending == "it goes on":
            scene.target.resume()
            text = await scene.answer()
            await scene.target.is_idle()
            assert text == await scene.other.text({"prompt": scene.prompt, "max_tokens": 4})
            await serves_the_next(scene.other, scene.target)
        else:
            await scene.target.kill()
            with pytest.raises(httpx.HTTPError):
                await scene.asking
        await scene.source.is_idle()
        await serves_the_next(scene.source, scene.other)


async def serves_the_next(source: Any, target: Any) -> None:
    """Fail unless the two do a request together."""
    prompt = make_prompt(2 * BLOCK_SIZE, 99)
    num_fetched = await target.metric("engine_prompts_fetched")
    params = await source.prefill(prompt)
    text = await target.text({"prompt": prompt, "max_tokens": 4, "kv_transfer_params": params})
    assert await target.metric("engine_prompts_fetched") == num_fetched + 1
    assert text == await source.text({"prompt": prompt, "max_tokens": 4})
    await source.is_idle()
    await target.is_idle()
