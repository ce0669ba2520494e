"""Routing policies: pure functions from what is known about a prompt and the fleet to a probability per candidate.

`decision` has what all policies share, `baselines` those that look at no cache: they keep no state, and are passed
randomness and a turn (how many requests were dispatched so far), which round robin counts with. So a decision can be
explained without being taken.

`priced` weighs in seconds, by `settings`. It keeps its state in arrays of fixed size: `work` what ranks have to do and
how fast they are, `in_flight` the prompts that are being computed. `attention` reads a model's config.
"""
