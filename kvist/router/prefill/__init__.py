"""Prefill and decode apart: one worker computes a prompt, another goes on with it.

`handover` is whether that is worth it and what each of the two is sent; `releases` tells a prefill worker what nobody
will fetch.
"""
