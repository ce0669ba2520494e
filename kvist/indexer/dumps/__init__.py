"""Indexes on their way elsewhere: to another service, or to disk and back after a restart.

A dump tells the blocks of one moment, what engines call them, and how far each stream was followed then. `dumper` makes
it while the index goes on changing, `format` is its bytes, `takeover` puts it into indexes whose streams go on from
there, and `keeper` keeps one in a folder. Nothing that was loaded counts before its stream proves that it goes on.
"""

from __future__ import annotations
