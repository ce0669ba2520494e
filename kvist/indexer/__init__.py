"""From streams to the index: subscribe to every worker, detect gaps and restarts, apply the events.

`Indexer` runs one task a source. A source sends Kvist's canonical batches (`canonical`) or an engine's own (`engine`),
as its first message shows. While a rank is in `Indexer.resyncing` its overlap must not count.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvist.indexer.indexer import Indexer
    from kvist.indexer.statistics import SourceStatistics

__all__ = ["Indexer", "SourceStatistics"]

_MODULE_OF = {"Indexer": "indexer", "SourceStatistics": "statistics"}


def __getattr__(name: str) -> object:
    """Import a public name at its first use: `Indexer` needs compiled code, the service's configuration does not."""
    if name not in _MODULE_OF:
        raise AttributeError(name)
    return getattr(import_module(f"kvist.indexer.{_MODULE_OF[name]}"), name)
