"""From streams to the index: subscribe to every worker, judge order and gaps, apply what is certain.

`Indexer` owns one task a source. A source speaks Kvist's canonical batches (`canonical`) or an engine's own (`engine`),
which its first message tells. While a rank is in `Indexer.resyncing` its overlap must not count.
"""

from kvist.indexer.block_size import learn_block_size
from kvist.indexer.indexer import Indexer
from kvist.indexer.statistics import SourceStatistics
from kvist.indexer.target import Index

__all__ = ["Index", "Indexer", "SourceStatistics", "learn_block_size"]
