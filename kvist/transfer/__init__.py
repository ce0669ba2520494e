"""Moves KV blocks between workers: one prefills, another decodes.

A receiver reserves blocks and asks the sender that holds the prompt's. `slices` says which block belongs into which,
from each group's cached tokens and window, and `heads` which part of it between ranks; `messages` and `results` are
what the two say to each other; `receiver` and `sender` are their halves of the protocol, without I/O: a transfer
completes at most once, and memory that a late write could reach is not used again (`states`). `service` drives them,
one a rank. Nothing here imports torch but what touches tensors.
"""
