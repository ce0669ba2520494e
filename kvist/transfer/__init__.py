"""Moves KV blocks from a worker that prefills to one that decodes.

A receiver reserves blocks, and asks the sender that holds the prompt's blocks to write into them. `commands` is the
interface to the engine, `messages` the protocol between two workers. Each rank has a `sender` and a `receiver`: a
transfer completes at most once, and memory that a late write could reach is not reused. `memory` and `heads` calculate
which bytes go where; `agents` and `bounce` move them. `service` runs one rank's thread, and `ranks` makes all ranks of
a worker one. Only `copier` imports torch.
"""
