"""Record what streams say, play it again, and tell what was in it.

A recording is an append-only set of files (`frames`, `format`, `writer`, `reader`), made from any subscription by the
`recorder`, with what was held before (`asking`). Its messages are selected (`selection`, `earlier`), altered where that
is asked for (`rewriting`), and go out at their own pace (`pacing`, `player`, which answers from `sent`), into an index
(`indexing`), into other files (`jsonl`), or into figures (`statistics`). What decides does no I/O and takes time as an
argument; only `recorder` and `player` know asyncio.
"""

from kvist.replay.reader import RecordingReader
from kvist.replay.recording import Record, RecordedSource, RecordingError
from kvist.replay.writer import RecordingWriter

__all__ = ["Record", "RecordedSource", "RecordingError", "RecordingReader", "RecordingWriter"]
