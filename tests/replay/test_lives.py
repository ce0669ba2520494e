"""Random lives of a recording: what comes out is what went in, up to the last whole chunk of each part."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from lives import seeds
from mcap.data_stream import ReadDataStream
from mcap.reader import make_reader
from mcap.records import Chunk, DataEnd
from mcap.records import Message as McapMessage
from mcap.stream_reader import StreamReader, breakup_chunk

from kvist.errors import InvalidValueError
from kvist.events.transports import Message
from kvist.replay import Record, RecordedSource, RecordingReader, RecordingWriter
from kvist.replay.recording import part_path
from kvist.replay.script import Moment, Script, Selection

LIVES = seeds(8)
SOURCES = [RecordedSource(name, f"tcp://{name}:1", engine) for name, engine in (("a", "vllm"), ("b/ö", "sglang"))]
S = 1_000_000_000


class Part:
    """What is known of one file: its records, and where each chunk of them ends."""

    def __init__(self, path: Path, session: int, records: list[Record]) -> None:
        """Take of the records those that the library's own reader finds in the closed file."""
        self.path = path
        self.session = session
        self.chunk_ends: list[tuple[int, int]] = []
        num_records = 0
        with path.open("rb") as file:
            summary = make_reader(file, validate_crcs=True).get_summary()
            assert summary is not None
            for index in sorted(summary.chunk_indexes, key=lambda index: index.chunk_start_offset):
                file.seek(index.chunk_start_offset + 9)
                chunk = Chunk.read(ReadDataStream(file))
                messages = [each for each in breakup_chunk(chunk, validate_crc=True) if isinstance(each, McapMessage)]
                expected = records[num_records : num_records + len(messages)]
                assert [each.data for each in messages] == [record.message.payload for record in expected]
                assert [each.log_time for each in messages] == [record.time_ns for record in expected]
                num_records += len(messages)
                self.chunk_ends.append((index.chunk_start_offset + index.chunk_length, num_records))
            file.seek(0)
            self.ends = [8]
            for each in StreamReader(file, emit_chunks=True).records:
                self.ends.append(file.tell())
                if isinstance(each, DataEnd):
                    break
        self.data_end = self.ends[-1]
        self.records = records[:num_records]

    def cut(self, num_bytes: int) -> None:
        """Lose the end of the file, as in a crash."""
        os.truncate(self.path, num_bytes)
        self.ends = [end for end in self.ends if end <= num_bytes]
        num_records = max((num for end, num in self.chunk_ends if end <= num_bytes), default=0)
        self.records = self.records[:num_records]

    @property
    def says_whose_it_is(self) -> bool:
        """Return whether what follows on the magic and the header is there."""
        return len(self.ends) >= 3

    @property
    def num_bytes_read(self) -> int:
        """Return how far the file is read: whole, once the end of its data is there."""
        read = max(self.ends, default=0)
        return self.path.stat().st_size if read == self.data_end else read

    @property
    def num_torn_bytes(self) -> int:
        return self.path.stat().st_size - self.num_bytes_read


class Life:
    """Sessions of recorders, each with its end, and the parts that they leave."""

    def __init__(self, seed: int, folder: Path, make: Any) -> None:
        self.random = random.Random(seed)
        self.make = make
        self.path = folder / self.random.choice(("fleet.mcap", "fleet", "fleet.7.mcap"))
        self.parts: list[Part] = []
        self.first_part = 0
        self.now_ns = make.time_ns
        self.told: list[str] = []

    def live(self) -> None:
        for _ in range(self.random.randint(2, 7)):
            self.record()
            self.random.choice((self.end_well, self.crash, self.crash, self.delete_the_oldest))()
            self.told[-1] += f" {self.parts[-1].path.stat().st_size}"
            self.read()
        self.play()

    # --- What recorders do ------------------------------------------------------------------------------------------

    def record(self) -> None:
        """Write a session, and see that nobody else can meanwhile."""
        first_part = self.first_part + len(self.parts)
        session = 1 + max((part.session for part in self.parts if part.says_whose_it_is), default=-1)
        rotate_bytes = self.random.choice((None, 4096, 4096, 20_000))
        sources = self.random.sample(SOURCES, self.random.randint(1, 2))
        records: list[Record] = []
        with RecordingWriter(self.path, sources, appends=bool(self.parts), rotate_bytes=rotate_bytes) as writer:
            for _ in range(self.random.choice((0, 1, 30, 120))):
                self.now_ns += self.random.choice((0, 1, S // 1000, S // 5, S, 40 * S))
                record = Record(session, self.random.choice(sources), self.now_ns, self.message())
                writer.add(record.source, record.message, record.time_ns)
                records.append(record)
                match self.random.randrange(30):
                    case 0:
                        writer.flush()
                    case 1:
                        writer.flush_if_due(self.now_ns + S)
                    case 2:
                        read = self.make.read(self.path)
                        assert read == [*self.expected, *records][: len(read)]
                        assert len(read) >= len(self.expected)
                    case 3:
                        with pytest.raises(InvalidValueError, match="nobody is writing"):
                            RecordingWriter(self.path, sources, appends=True)
            num_parts = writer.num_parts
        for number in range(first_part, first_part + num_parts):
            self.parts.append(Part(part_path(self.path, number), session, records))
            records = records[len(self.parts[-1].records) :]
        assert not records
        self.told.append(f"{num_parts} parts of session {session} from {first_part} on")
        self.session_parts = num_parts

    def message(self) -> Message:
        """Return a batch of a worker, an engine's, or what is none, under any topic and number."""
        sequence = self.random.choice((0, 5, 2**32 - 1, 2**32, 2**64 - 1))
        size = self.random.choice((0, 3, 100, 100, 700, 90_000))
        made: Message = self.random.choice(
            (
                self.make.batch(sequence, self.make.stored(*range(size // 8)), worker=self.random.choice("vw")),
                self.make.engine_batch(sequence, timestamp_s=self.random.choice((float("nan"), -1.0, 1e300, 1.5e9))),
                Message(b"", sequence, self.random.randbytes(size)),
            )
        )
        return made._replace(topic=self.random.choice((made.topic, made.topic, b"\xff\0", b"x" * 300)))

    # --- How they end -----------------------------------------------------------------------------------------------

    def end_well(self) -> None:
        self.told[-1] += ", ended"

    def crash(self) -> None:
        """Lose the session's end from any byte on, whole parts among it."""
        for part in self.parts[len(self.parts) - self.random.randrange(self.session_parts) :]:
            part.path.unlink()
            self.parts.remove(part)
        size = self.parts[-1].path.stat().st_size
        self.parts[-1].cut(self.random.choice((0, self.random.randint(0, size), self.random.randint(0, size))))
        cut = size - self.parts[-1].path.stat().st_size
        self.told[-1] += f", cut {cut} bytes of part {len(self.parts) + self.first_part}"

    def delete_the_oldest(self) -> None:
        """As whoever keeps only the last days does; what follows goes on from the first that is left."""
        if len(self.parts) > 1:
            self.told[-1] += f", {self.parts[0].path.name} deleted"
            self.parts.pop(0).path.unlink()
            self.first_part += 1

    # --- What is read -----------------------------------------------------------------------------------------------

    @property
    def expected(self) -> list[Record]:
        return [record for part in self.parts for record in part.records]

    def read(self) -> None:
        with RecordingReader(self.path) as reader:
            assert list(reader) == self.expected, self.told
            num_torn_bytes = [part.num_torn_bytes for part in self.parts if part.num_torn_bytes]
            assert [torn.num_bytes for torn in reader.torn] == num_torn_bytes, self.told
            assert reader.num_bytes_read == sum(part.num_bytes_read for part in self.parts)

    def play(self) -> None:
        """Choose some of it, as `kvist replay` does."""
        recorded = self.expected
        for _ in range(6):
            workers = self.random.choice(((), ("v",), ("w", "a"), ("b/ö",), ("nobody",)))
            begins_ns = recorded[0].time_ns if recorded else 0
            moments = [(record.time_ns - begins_ns) / S for record in recorded] + [0.0, 0.5, 1e6]
            since, until = sorted(self.random.choices(moments, k=2))
            selection = Selection(frozenset(workers), Moment(since, False), Moment(until, False))
            script = Script(self.path, selection=selection)
            played = [line for lines in script.lines() for line in lines]
            meant = [record for record in recorded if record.time_ns < begins_ns + int(until * 1e9)]
            meant = [record for record in meant if not workers or self.worker_of(record) in workers]
            assert [line.record for line in played] == meant, self.told
            late = [line.record.time_ns - begins_ns >= int(since * 1e9) for line in played]
            assert [not line.is_early for line in played] == late, self.told

    @staticmethod
    def worker_of(record: Record) -> str:
        payload = record.message.payload
        return payload[9:10].decode() if payload[1:7] == b"\xa6kvist" else record.source.name


@pytest.mark.parametrize("seed", LIVES)
def test_a_random_life_of_a_recording(seed: int, make: Any, tmp_path: Path) -> None:
    Life(seed, tmp_path, make).live()
