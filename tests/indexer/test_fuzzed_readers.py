"""No bytes from outside make compiled code read or write what is not its own, and what it accepts means what it says.

Input lies right before a page that nobody may touch, or right behind one, and so does what is written for it, so that
one byte too far ends the process: a child, which has noted the case it was at. By itself, from the first case of a
round on: `python tests/indexer/test_fuzzed_readers.py vllm 4096 8192`
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray
from zmtp_splitter import split as split_in_python

from kvist.events import EngineEvent, WorkerRank
from kvist.events.dialects import decode_block_events
from kvist.events.dialects.block_events import FIELD_ORDERS
from kvist.events.transports.block import PADDING_BYTES, MessageBlock
from kvist.indexer.compiled.frames import split
from kvist.indexer.compiled.hashing import hash_chain
from kvist.indexer.compiled.json_tokens import read_batch, read_token_ids
from kvist.indexer.engine import EngineLane
from kvist.indexer.engine_rank import EngineRank
from kvist.radix import RadixIndex

ROUND = 2048
"""Cases that begin with a new reader: what one of them does depends on none but those before it."""
CAPACITY_BYTES = 1 << 16
KEY = b"token_ids"
encode = msgspec.msgpack.encode


class Guarded:
    """Memory between two pages that nobody may touch."""

    def __init__(self) -> None:
        page = mmap.PAGESIZE
        self.memory = mmap.mmap(-1, CAPACITY_BYTES + 2 * page)
        self.all = np.frombuffer(self.memory, np.uint8)
        for start in (0, page + CAPACITY_BYTES):
            forbidden = ctypes.c_void_p(self.all.ctypes.data + start)
            assert ctypes.CDLL(None).mprotect(forbidden, page, 0) == 0
        self.bytes = self.all[page : page + CAPACITY_BYTES]

    def put(self, content: bytes, rng: random.Random, padding_bytes: int = 0) -> NDArray[np.uint8]:
        """Put bytes to the end, but for a padding of anything, or now and then to the beginning; return their place."""
        start = 0 if rng.random() < 0.1 else CAPACITY_BYTES - padding_bytes - len(content)
        self.bytes[start : start + len(content)] = np.frombuffer(content, np.uint8)
        if padding_bytes:
            self.bytes[start + len(content) :][:padding_bytes] = rng.choice([0, 1, 0x90, 0xC0, 0xC1, 0xDD, 0xFF])
        return self.bytes[start : start + len(content)]

    def block(self, content: bytes, rng: random.Random) -> MessageBlock:
        """Return a message of these bytes, with no more beyond it than its reader may count on."""
        place = self.put(content, rng, PADDING_BYTES)
        start = place.ctypes.data - self.all.ctypes.data
        return MessageBlock(self.memory, np.array([[start, 0, 0, start, len(content)]], np.int64))


class Engine:
    """Batches of an engine, and the lane that takes them; what that leaves is given to the rank, as a follower does."""

    def __init__(self, rng: random.Random, name: str) -> None:
        self.rng = rng
        self.input = Guarded()
        self.decode = partial(decode_block_events, engine=name)
        self.order = FIELD_ORDERS[name]
        self.groups = rng.choice([[], [0], [0, 1, 1 << 30]])
        index = RadixIndex(seed=rng.getrandbits(32), segment_bits=1)
        self.lane = EngineLane(4, name, index)
        self.lane.stream["has_block_size"] = 1
        for number in range(3):
            source = WorkerRank("w", number)
            self.lane.ranks[number] = EngineRank(source, 4, index)

    def message(self) -> bytes:
        rng = self.rng
        events = [self._event() for _ in range(rng.choice([0, 1, 1, 2, 5, 20]))]
        return encode([1.5, events, *rng.choice([[], [0], [2], [None], [junk(rng)]])])

    def _event(self) -> Any:
        rng = self.rng
        num_blocks = rng.choice([0, 1, 1, 2, 30])
        fields = {
            "type": rng.choice(["BlockStored"] * 6 + ["BlockRemoved"] * 3 + ["AllBlocksCleared"]),
            "block_hashes": [self._hash() for _ in range(num_blocks)],
            "parent_block_hash": rng.choice([None, None, self._hash()]),
            "token_ids": [rng.choice([5, 200, 300, 70_000]) for _ in range(4 * num_blocks + (rng.random() < 0.1))],
            "block_size": rng.choice([4] * 9 + [8, 1 << 40]),
            "lora_id": rng.choice([None] * 9 + [0, 1]),
            "medium": rng.choice(["GPU"] * 9 + [None, "CPU", "STORAGE", "Disk"]),
            "lora_name": rng.choice([None] * 9 + ["", "adapter"]),
            "extra_keys": rng.choice([None] * 9 + [[None] * num_blocks, [["salt"]] * num_blocks]),
            "group_idx": rng.choice([None, *self.groups]),
            "lookahead_token_ids": rng.choice([None, [[7, 300]] * num_blocks, [[70_000]] * num_blocks]),
            "kv_cache_spec_kind": rng.choice([None] * 9 + ["full_attention", "sliding_window", "mamba"]),
            "kv_cache_spec_sliding_window": rng.choice([None] * 9 + [1, 1 << 20, 1 << 40]),
            "novelty": junk(rng),
        }
        if fields["type"] in self.order and rng.random() < 0.3:
            return [fields["type"], *(fields.get(name) for name in self.order[fields["type"]]), junk(rng)]
        kept = [name for name in fields if name in ("type", "block_hashes", "token_ids") or rng.random() < 0.7]
        return {name: fields[name] for name in rng.sample(kept, len(kept))}

    def _hash(self) -> int | bytes:
        rng = self.rng
        return rng.choice([rng.randrange(300), rng.getrandbits(64), -rng.randrange(1 << 40), rng.randbytes(32)])

    def read(self, content: bytes) -> None:
        block = self.input.block(content, self.rng)
        self.lane.set_block(block, None)
        num_calls = num_batches = 0
        while self.lane.message_idx == 0:
            is_stopped, event = self.lane.apply_messages(0)
            num_batches += int(self.lane.stream["num_batches"])
            if event is not None:
                self._admit(event)
            if is_stopped:
                break
            num_calls += 1
            assert num_calls < 1000, "no end of it"
        if num_batches:
            self.decode(content, "w")

    def _admit(self, part: bytes) -> None:
        batch = self.decode(part, "w")
        rank = self.lane.ranks.get(batch.rank)
        events: tuple[EngineEvent, ...] = batch.events if rank is not None else ()
        for event in events:
            rank.admit(event)


class Frames:
    """Frames of ZMTP, and the splitter, which must say what the one in Python says."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.input, self.output = Guarded(), Guarded()

    def message(self) -> bytes:
        parts = []
        for _ in range(self.rng.choice([1, 1, 2, 4])):
            parts += [self._frame(1, self.rng.choice([0, 8, 300])), b"\x01\x08" + bytes(8)]
            parts.append(self._frame(0, self.rng.choice([0, 1, 50, 255, 256, 700])))
        return b"".join(parts)

    def _frame(self, flags: int, num_bytes: int) -> bytes:
        body = self.rng.randbytes(num_bytes)
        if num_bytes > 255 or self.rng.random() < 0.1:
            return struct.pack(">BQ", flags | 2, num_bytes) + body
        return bytes([flags, num_bytes]) + body

    def read(self, content: bytes) -> None:
        place, num_rows = self.input.put(content, self.rng), self.rng.randrange(6)
        table = self.output.bytes[CAPACITY_BYTES - num_rows * 40 :].view(np.int64).reshape(-1, 5)
        expected = np.zeros((num_rows, 5), np.int64)
        table[:] = 0
        found = split(place, 0, len(place), table, 1000)
        assert found == split_in_python(content, 0, len(content), expected, 1000)
        assert (table == expected).all()


class Json:
    """Arrays of JSON, and the reader of token ids in them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.input, self.output = Guarded(), Guarded()

    def message(self) -> bytes:
        rng = self.rng
        bits = rng.choice([7, 17, 17, 32, 33, 64])
        integers = [rng.getrandbits(bits) for _ in range(rng.choice([0, 1, 9, 60, 400, 1600]))]
        return json.dumps(integers, indent=rng.choice([None, None, 1]))[1:-1].encode()

    def read(self, content: bytes) -> None:
        token_ids = self.output.bytes[-4 * (len(content) // 2 + 1) :].view(np.uint32)
        count = read_token_ids(self.input.put(content, self.rng), 0, len(content), token_ids)
        if count >= 0:
            assert token_ids[:count].tolist() == json.loads(b"[%b]" % content)


class Batches(Json):
    """Batches of such arrays, and what reads those."""

    def message(self) -> bytes:
        rng = self.rng
        batch = [json.loads(b"[%b]" % super(Batches, self).message())[:300] for _ in range(rng.choice([1, 1, 3, 20]))]
        return json.dumps(batch, indent=rng.choice([None, None, 1]))[1:].encode()[: CAPACITY_BYTES // 2]

    def read(self, content: bytes) -> None:
        size_bytes = 4 * (len(content) // 2 + 1)
        token_ids, ends = self.output.bytes[-2 * size_bytes :].view(np.uint32).reshape(2, -1)
        end, num_arrays = read_batch(self.input.put(content, self.rng), 0, token_ids, ends)
        if end >= 0:
            read = np.split(token_ids[: ends[num_arrays - 1]], ends[: num_arrays - 1])
            assert [each.tolist() for each in read] == json.loads(b"[" + content[: end + 1])


class Hashes:
    """Tokens, and what hashes blocks of them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.input, self.output = Guarded(), Guarded()

    def message(self) -> bytes:
        return self.rng.randbytes(4 * self.rng.choice([1, 16, 64, 200, 1000, 5000]))

    def read(self, content: bytes) -> None:
        rng = self.rng
        content = content[: len(content) // 4 * 4]
        num_blocks = rng.choice([1, 2, 5])
        block_bytes = len(content) // 4 // num_blocks * 4
        if block_bytes == 0:
            return
        content = content[: num_blocks * block_bytes]
        tokens, seed = self.input.put(content, rng), rng.getrandbits(64)
        hashes = self.output.bytes[-8 * num_blocks :].view(np.uint64)
        hash_chain(tokens, block_bytes, block_bytes, np.uint64(seed), hashes)
        last = 0
        for number, block_hash in enumerate(hashes.tolist()):
            local = xxhash.xxh3_64_intdigest(content[number * block_bytes : (number + 1) * block_bytes], seed)
            last = xxhash.xxh3_64_intdigest(struct.pack("<QQ", last, local), 1337) if number else local
            assert block_hash == last


READERS = {
    "vllm": lambda rng: Engine(rng, "vllm"),
    "sglang": lambda rng: Engine(rng, "sglang"),
    "frames": Frames,
    "json": Json,
    "batches": Batches,
    "hashes": Hashes,
}


def junk(rng: random.Random) -> Any:
    """Return a value that no reader knows, deep now and then."""
    value = rng.choice([None, True, 7, -1, 1.5, "text", "é", b"\xff", [1, [2]], {"a": [None]}, [], {}, "x" * 300])
    for _ in range(rng.choice([0, 0, 0, 3, 300])):
        value = rng.choice([[value], {"k": value}])
    return value


def broken(rng: random.Random, content: bytes, other: bytes) -> bytes:
    """Return a message that something happened to, once or a few times."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = rng.randrange(min(len(data), rng.choice([30, 1 << 16, 1 << 16])) + 1)
        kind = rng.randrange(11)
        if kind == 0:
            del data[at:]
        elif kind == 1 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at : at + 1] = bytes(
                [rng.choice(b"\x00\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0\xc1\xc4\xc6\xca\xcf\xd3\xdc\xdd\xff")]
            )
        elif kind == 3:
            size = rng.choice([1, 2, 4, 8])
            length = rng.choice([0, 1, 255, len(data), len(data) - at, (1 << 31) - 1, (1 << 8 * size) - 1, 1 << 40])
            data[at : at + size] = (length % (1 << 8 * size)).to_bytes(size, rng.choice(["big", "little"]))
        elif kind == 4:
            data[at:] = other[rng.randrange(len(other) + 1) :]
        elif kind == 5:
            data[at:at] = rng.choice([b"\x91", b"\x81\xa0", b"\xdc\xff\xff", b"["]) * rng.choice(
                [1, 20, 255, 256, 2000]
            )
        elif kind == 6:
            del data[at : at + rng.choice([1, 1, 8, 50])]
        elif kind == 7:
            data[at:at] = data[at : at + rng.choice([1, 9, 100])]
        elif kind == 8 and data:
            data[0] = data[0] & 0xF0 | rng.randrange(16)  # as many fields, but for what is there
            data += rng.choice([b"", b"\xc0", b"\xc1", b"\xc0\xc0", b"\xc0\xc1", b"\xdd\xff\xff\xff\xff"])
        elif kind == 9:
            data += rng.randbytes(rng.choice([1, 2, 9]))
        elif kind == 10:
            data[at : at + 16] = rng.randbytes(16)
    return bytes(data[: CAPACITY_BYTES - PADDING_BYTES])


def fuzz(name: str, first: int, end: int, progress: NDArray[np.int64]) -> None:
    """Give a reader the cases of whole rounds; what it is at stands in `progress`."""
    for start in range(first // ROUND * ROUND, end, ROUND):
        rng = random.Random(f"{name} {start}")
        reader = READERS[name](rng)
        other = reader.message()
        for case in range(start, start + ROUND):
            progress[0] = case
            content = reader.message() if case % 32 == 0 else content  # noqa: F821
            if case % 32:
                reader.read(rng.randbytes(rng.randrange(100)) if case % 64 == 1 else broken(rng, content, other))
            else:
                reader.read(content)
                other = content if rng.random() < 0.5 else other


def run_child(folder: Path, *arguments: str | int, **environment: str) -> None:
    """Fuzz in a process of its own, and fail with the case at which it died."""
    place = folder / "case"
    place.write_bytes(bytes(8))
    command = [sys.executable, __file__, *map(str, arguments), str(place)]
    oracles = {"PYTHONPATH": str(Path(__file__).parents[1] / "oracles")}
    environment = {**os.environ, **oracles, **environment}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    case = int.from_bytes(place.read_bytes(), "little")
    assert result.returncode == 0, f"{result.returncode} at case {case} of {result.stdout}: {result.stderr[-3000:]}"


def test_no_broken_message_leads_a_reader_beyond_what_it_may_touch(tmp_path: Path) -> None:
    run_child(tmp_path, "all", 0, ROUND)


@pytest.mark.xdist_group("checked bounds")
def test_no_broken_message_leads_a_reader_beyond_any_array(tmp_path: Path, checked_bounds: dict[str, str]) -> None:
    """A planted overrun shows that the checks are on."""
    run_child(tmp_path, "all", 0, ROUND, **checked_bounds)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", READERS)
def test_none_of_ten_million_broken_messages_leads_a_reader_beyond_what_it_may_touch(name: str, tmp_path: Path) -> None:
    run_child(tmp_path, name, 0, 10_000_000)


def overrun() -> None:
    """Have a reader told of more bytes than there are."""
    hash_chain(np.zeros(60, np.uint8), 64, 64, np.uint64(0), np.empty(1, np.uint64))


if __name__ == "__main__":
    if "NUMBA_BOUNDSCHECK" in os.environ:
        with pytest.raises(IndexError):
            overrun()
    which, first_case, end_case, *to_progress = sys.argv[1:]
    noted = np.memmap(to_progress[0], np.int64, shape=1) if to_progress else np.zeros(1, np.int64)
    for each in READERS if which == "all" else [which]:
        print(each, flush=True)
        fuzz(each, int(first_case), int(end_case), noted)
