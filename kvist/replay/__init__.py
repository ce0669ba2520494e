"""Records event streams, plays them again, and analyses them.

A recording is a set of MCAP files (`recording`, `writer`, `reader`). The `recorder` makes one from subscriptions, and
asks for what ranks held before (`recovery`). A `script` selects, times and repeats its messages, for subscribers
(`player`, with replays from `blocks`), for an index (`indexing`, which also compares two), or for analysis
(`numbering`, `statistics`, `history`). All decisions are made without I/O, with time as an argument; only `recorder`
and `player` use asyncio.
"""

from kvist.replay.reader import RecordingReader
from kvist.replay.recording import Record, RecordedSource, RecordingError
from kvist.replay.writer import RecordingWriter

__all__ = ["Record", "RecordedSource", "RecordingError", "RecordingReader", "RecordingWriter"]
