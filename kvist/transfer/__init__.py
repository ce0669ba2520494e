"""Moves KV blocks between workers: one prefills, another decodes.

A receiver reserves blocks and asks the sender that holds the prompt's. `commands` is what the engine says and hears,
`messages` what two workers say to each other. `sender` and `receiver` are a rank's halves: a transfer completes at most
once, and memory that a late write could reach is not used again. `memory` and `heads` say which bytes belong where,
`agents` and `bounce` move them. `service` is the thread of one rank, `ranks` all of a worker's. Only `copier` imports
torch.
"""
