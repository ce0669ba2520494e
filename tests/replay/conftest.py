"""Recordings to read, and messages to record: canonical ones, and engines' own as their encoders write them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvist.events import Batch, Event, Heartbeat, Removed, Stored
from kvist.events.codec import encode_batch
from kvist.events.transports import Message
from kvist.replay import Record, RecordedSource, RecordingReader, RecordingWriter

MS = 1_000_000
TIME_NS = 1_763_650_000_000_000_000
SOURCE = RecordedSource("pod-1", "tcp://127.0.0.1:5557")


class Make:
    """Makes messages and recordings; one instance serves a test."""

    source = SOURCE
    time_ns = TIME_NS

    @staticmethod
    def packed(*hashes: int) -> bytes:
        return np.array(hashes, np.uint64).tobytes()

    @classmethod
    def stored(cls, *hashes: int, parent: int | None = None) -> Stored:
        return Stored(cls.packed(*hashes), parent)

    @classmethod
    def removed(cls, *hashes: int) -> Removed:
        return Removed(cls.packed(*hashes))

    @staticmethod
    def batch(sequence: int, *events: Event, worker: str = "w", rank: int = 0, epoch: int = 7) -> Message:
        """Return a canonical message."""
        payload = encode_batch(Batch(worker, rank, epoch, sequence, 4, 1763650000.5, events))
        return Message(f"kv/{worker}/{rank}".encode(), sequence, payload)

    @classmethod
    def heartbeat(cls, sequence: int, num_blocks: int, digest: int, **names: Any) -> Message:
        return cls.batch(sequence, Heartbeat(num_blocks, digest), **names)

    @staticmethod
    def engine_batch(sequence: int, *events: Any, rank: int | None = 0, timestamp_s: float = 1.5) -> Message:
        """Return a message of an engine's own stream."""
        return Message(b"", sequence, msgspec.msgpack.encode([timestamp_s, list(events), rank]))

    @staticmethod
    def engine_stored(*hashes: int, tokens: Sequence[int], parent: int | None = None, **more: Any) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": list(hashes),
            "parent_block_hash": parent,
            "token_ids": list(tokens),
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            **more,
        }

    @staticmethod
    def engine_removed(*hashes: int) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}

    @staticmethod
    def records(*messages: Message, source: RecordedSource = SOURCE, step_ms: int = 10) -> list[Record]:
        """Return records a fixed time apart."""
        return [Record(0, source, TIME_NS + idx * step_ms * MS, message) for idx, message in enumerate(messages)]

    @staticmethod
    def write(path: Path, records: Sequence[Record], **options: Any) -> Path:
        """Write a recording of one session."""
        sources = dict.fromkeys(record.source for record in records)
        with RecordingWriter(path, list(sources), **options) as writer:
            for record in records:
                writer.add(record.source, record.message, record.time_ns)
        return path

    @staticmethod
    def read(path: Path) -> list[Record]:
        with RecordingReader(path) as reader:
            return list(reader)


@pytest.fixture(scope="session")
def make() -> Make:
    return Make()


@pytest.fixture
def recording(make: Make, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes messages of one source into a new recording."""

    def write(*messages: Message, **options: Any) -> Path:
        return make.write(tmp_path / "recorded.mcap", make.records(*messages), **options)

    return write


@pytest.fixture(scope="session")
def golden() -> dict[str, bytes]:
    """Return what vLLM's and SGLang's own encoders wrote, by dialect and name, as the dialects' tests have it."""
    found = {}
    for dialect in ("vllm", "sglang"):
        tree = ast.parse((Path(__file__).parents[1] / "events" / "dialects" / f"test_{dialect}.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.Assign) and "bytes.fromhex" in ast.unparse(node.value):
                assert isinstance(node.value, ast.Call)
                found[f"{dialect} {ast.unparse(node.targets[0])}"] = bytes.fromhex(ast.literal_eval(node.value.args[0]))
    return found
