"""Two tenants, a real router and a real engine: what one has cached, the other cannot find out, however it asks."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from kvist.cli.up import ProcessGroup
from kvist.engine import bundled_model_path
from kvist.router.tenants.isolation import salt_of
from kvist.router.tenants.tenant import Tenant

MODEL = str(bundled_model_path())
SERVE = ("serve", "--model", MODEL, "--served-model-name", "m", "--port", "0")
SECRET = "kept-by-the-operator"
BLOCK = 16

pytestmark = pytest.mark.xdist_group("whole system")


class Attacked:
    """A router with tenants, and the one engine behind it."""

    def __init__(self, router: str, engine: str, client: httpx.AsyncClient) -> None:
        self.router, self.engine, self.client = router, engine, client

    async def num_found(self) -> float:
        """Return how many tokens the engine has found in its cache so far, by its own count."""
        page = (await self.client.get(f"{self.engine}/metrics")).text
        (number,) = re.findall(r"^kvist_engine_cached_tokens_total (\S+)$", page, re.MULTILINE)
        return float(number)

    async def ask(self, key: str, prompt: list[int], **more: Any) -> int:
        """Return how much of the prompt was cached, as the answer says and the engine has counted."""
        before, body = await self.num_found(), {"model": "m", "prompt": prompt, "max_tokens": 1, **more}
        headers = {"authorization": f"Bearer {key}"}
        answer = await self.client.post(f"{self.router}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert await self.num_found() - before == cached
        return int(cached)


@asynccontextmanager
async def attacked(folder: Path, *options: str) -> AsyncIterator[Attacked]:
    listed = [("a", None), ("b", None), ("c", "friends"), ("d", "friends")]
    path = folder / "tenants.json"
    entries = [
        {"name": name, "keys": [sha256(name.encode()).hexdigest()]} | ({"group": group} if group else {})
        for name, group in listed
    ]
    path.write_text(json.dumps({"tenants": entries}))
    async with ProcessGroup() as group, httpx.AsyncClient(timeout=60, trust_env=False) as client:
        engine = await group.start("worker", *SERVE)
        router = await group.start(
            *("router", "route", "--worker-urls", engine.url, "--port", "0", "--tenants", str(path), *options)
        )
        yield Attacked(router.url, engine.url, client)


async def test_nobody_finds_what_others_have_cached_whatever_they_ask(tmp_path: Path) -> None:
    random, groups = Random(5), {"a": "a", "b": "b", "c": "friends", "d": "friends"}
    stolen = [salt_of(SECRET, Tenant(name="a"), None), "", "a", "\0"]
    cached: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    prompts = [[random.randrange(3, 900) for _ in range(200)]]
    async with attacked(tmp_path, "--isolation", "tenant", "--isolation-secret", SECRET) as system:
        for _ in range(150):
            prompt = list(random.choice(prompts))
            if random.random() < 0.5:  # guesses that go on where others' prompts do, or leave them
                prompt = prompt[: random.randrange(1, 200)] + [random.randrange(3, 900) for _ in range(20)]
                prompts.append(prompt)
            key, salt = random.choice("abcd"), random.choice([None, None, *stolen])
            own = cached.setdefault((groups[key], salt or ""), set())
            found = await system.ask(key, prompt, **({} if salt is None else {"cache_salt": salt}))
            blocks = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
            usable = [block for block in blocks if len(block) < len(prompt)]
            assert found == max((len(block) for block in usable if block in own), default=0)
            own.update(blocks)
    assert len(cached) >= 12


async def test_without_isolation_the_attack_succeeds(tmp_path: Path) -> None:
    prompt = list(range(100, 200))
    async with attacked(tmp_path) as system:
        assert [await system.ask(key, prompt) for key in "ab"] == [0, 96]
