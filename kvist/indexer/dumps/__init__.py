"""Indexes on their way elsewhere: to another service, or to disk and back after a restart.

A dump has the blocks of one moment, the engines' hashes for them, and how far each stream was followed then. `dumper`
makes it while the index goes on changing, `format` defines its bytes, `takeover` loads it into indexes whose streams
continue from there, and `keeper` keeps one in a folder. Nothing that was loaded counts until its stream proves that it
continues.
"""

from __future__ import annotations
