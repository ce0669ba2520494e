"""Epochs for an engine's own stream, which has none: other bytes under a known number mean another process."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from xxhash import xxh3_64_intdigest

_NO_SEQUENCE = (1 << 64) - 1  # where no message is remembered: no engine gets that far


class RestartDetector:
    """Starts the next epoch when a message shows that the stream is another process's.

    Remembers a fingerprint of the last `capacity` messages. A timestamp in each makes equal bytes by chance unlikely.
    `sequences` and `fingerprints` are a ring, in which a number's place is the number modulo their length, a power of
    two: code that applies messages elsewhere writes their XXH3-64 there, and updates `last_sequence`.
    """

    def __init__(self, capacity: int = 2048) -> None:
        self.epoch = 0
        num_places = 1 << (capacity - 1).bit_length()
        self.sequences = np.full(num_places, _NO_SEQUENCE, np.uint64)
        self.fingerprints = np.zeros(num_places, np.uint64)
        self.last_sequence = -1

    def observe(self, sequence: int, payload: bytes) -> int:
        """Record a live message and return its epoch: the next one if its number had other bytes before."""
        fingerprint = xxh3_64_intdigest(payload)
        if sequence <= self.last_sequence and self._recall(sequence) != fingerprint:
            self._restart()
        self._remember(sequence, fingerprint)
        return self.epoch

    def is_known(self, sequence: int, payload: bytes) -> bool:
        """Return whether a number is remembered with these bytes."""
        return self._recall(sequence) == xxh3_64_intdigest(payload)

    def remember(self, messages: Iterable[tuple[int, bytes]]) -> None:
        """Record messages that turned out to be of this process."""
        for sequence, payload in messages:
            self._remember(sequence, xxh3_64_intdigest(payload))

    def remembered(self) -> list[tuple[int, int]]:
        """Return sequence and fingerprint of each message remembered, oldest first."""
        places = np.flatnonzero(self.sequences != _NO_SEQUENCE)
        places = places[np.argsort(self.sequences[places])]
        return list(zip(self.sequences[places].tolist(), self.fingerprints[places].tolist(), strict=True))

    def resume(self, remembered: Iterable[tuple[int, int]], last_sequence: int) -> None:
        """Continue from what another detector remembered, whose last message was this one."""
        for sequence, fingerprint in remembered:
            self._remember(sequence, fingerprint)
        self.last_sequence = last_sequence

    def observe_answer(self, messages: Iterable[tuple[int, bytes]], last_sequence: int | None) -> int:
        """Record an answer that was asked for from `last_sequence` on, the last message applied; return its epoch.

        It is the next epoch unless the answer has that message, with the same bytes: an engine that no longer has it
        has restarted, or forgotten so much that this cannot be told from a restart.
        """
        fingerprints = {sequence: xxh3_64_intdigest(payload) for sequence, payload in messages}
        is_known = last_sequence is None or last_sequence in fingerprints
        if not is_known or any(
            self._recall(sequence) not in (None, fingerprint) for sequence, fingerprint in fingerprints.items()
        ):
            self._restart()
        for sequence, fingerprint in fingerprints.items():
            self._remember(sequence, fingerprint)
        return self.epoch

    def _restart(self) -> None:
        self.epoch += 1
        self.sequences.fill(_NO_SEQUENCE)
        self.last_sequence = -1

    def _recall(self, sequence: int) -> int | None:
        place = sequence & (len(self.sequences) - 1)
        return int(self.fingerprints[place]) if self.sequences[place] == sequence else None

    def _remember(self, sequence: int, fingerprint: int) -> None:
        place = sequence & (len(self.sequences) - 1)
        self.sequences[place], self.fingerprints[place] = sequence, fingerprint
        self.last_sequence = max(self.last_sequence, sequence)
