"""The wire format's document is true: its examples decode to what it says of them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from kvist.events.codec import decode_batch, decode_snapshot_part
from kvist.events.hashing import block_hashes
from kvist.events.snapshot import HeldBlocks, Snapshot, blocks_digest, snapshot_parts
from kvist.events.types import Batch, Heartbeat, Removed, Stored, Tier, WorkerRank

DOCUMENT = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text(encoding="utf-8")


def examples() -> list[bytes]:
    blocks = re.findall(r"^```\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)
    leading_hex = re.compile(r"^(?:[0-9a-f]{2} )*[0-9a-f]{2}(?=  |$)", re.MULTILINE)
    return [bytes.fromhex("".join(leading_hex.findall(block))) for block in blocks]


def test_the_examples_decode_to_what_the_text_says():
    first, second = block_hashes(range(1, 9), 4)
    expected = (
        Stored(first.tobytes() + second.tobytes()),
        Removed(second.tobytes()),
        Heartbeat(1, blocks_digest([int(first)], Tier.GPU)),
    )
    for sequence, (payload, event) in enumerate(zip(examples()[:3], expected, strict=True)):
        batch = Batch("worker-0", 0, 0x000691F29D000000, sequence, 4, 1763650000.5 + (0, 0.5, 1.5)[sequence], (event,))
        assert decode_batch(payload, "document") == (batch, 0)


def test_the_snapshot_decodes_to_what_the_text_says():
    first, second = block_hashes(range(1, 9), 4)
    (payload,) = examples()[3:]
    held = HeldBlocks(np.array([first, second]), np.array([0, 1], np.uint32), np.array([1, 3], np.uint8))
    snapshot = Snapshot(WorkerRank("worker-0", 0), 0x000691F29D000000, 1, 4, held.holding(), (held,))
    assert [decode_snapshot_part(payload, "document")] == list(snapshot_parts(snapshot))


def test_the_tiers_are_those_of_the_table():
    table = re.findall(r"^\| (\d) \| (\w+)", DOCUMENT.partition("## Names of blocks")[0], re.MULTILINE)
    first_words = {Tier.GPU: "GPU", Tier.HOST: "host", Tier.DISK: "local", Tier.EXTERNAL: "external"}
    assert [(str(tier.value), word) for tier, word in first_words.items()] == table[-4:]


def test_routers_users_are_told_when_scores_are_upper_bounds():
    assert "**upper bounds**" in DOCUMENT
