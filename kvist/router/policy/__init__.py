"""Routing policies: pure functions from what is known about a prompt and the fleet to a probability per candidate.

A policy never draws, keeps no state and reads no clock: `decide` takes the randomness, and `turn` (how many requests
were dispatched so far) is what round robin counts with. So a decision can be explained without being taken. `decision`
has what all policies share, `cost` the one that looks at caches, `baselines` the others.

`priced` weighs in seconds. It keeps what it learns and has handed out, in arrays of fixed size: `work` what ranks have
to do and how fast they are, `in_flight` the prompts under way.
"""
