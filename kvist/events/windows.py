"""Attention windows as engines declare them: `int | FULL | UNKNOWN`, ordered.

A window is the number of tokens a query may look back on, itself included. FULL is full attention and larger than any
number. UNKNOWN is an engine that never says: such a group passes only while its rank has shown one group.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Final, Literal, TypeAlias


class UnsizedWindow(Enum):
    """The two windows that are not a number of tokens."""

    FULL = "full"
    UNKNOWN = "unknown"


FULL: Final = UnsizedWindow.FULL
UNKNOWN: Final = UnsizedWindow.UNKNOWN

KnownWindow: TypeAlias = int | Literal[UnsizedWindow.FULL]
Window: TypeAlias = KnownWindow | Literal[UnsizedWindow.UNKNOWN]


def window_size(window: KnownWindow) -> float:
    """Return a number that orders known windows: tokens, or infinity for FULL."""
    return math.inf if window is FULL else window
