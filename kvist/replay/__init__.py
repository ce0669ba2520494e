"""Record what streams say, play it again, and tell what was in it.

A recording is a set of MCAP files (`recording`, `writer`, `reader`), made from any subscription by the `recorder`, with
what was held before (`recovery`). Its messages are selected, timed and repeated (`script`), and go out to subscribers
(`player`, which answers from `blocks`), into an index (`indexing`, which compares two as well), or into figures
(`statistics`, `history`). What decides does no I/O and takes time as an argument; only `recorder` and `player` know
asyncio.
"""

from kvist.replay.reader import RecordingReader
from kvist.replay.recording import Record, RecordedSource, RecordingError
from kvist.replay.writer import RecordingWriter

__all__ = ["Record", "RecordedSource", "RecordingError", "RecordingReader", "RecordingWriter"]
