"""Disaggregated prefill and decode: one worker computes a prompt, another generates from it.

`handover` has the plan of a request and the state of its hand-over; `dialect` is what engines' protocols have in
common, and each has a module: `vllm`, of which Kvist's is a kind, `sglang` and `trtllm`. `split` splits a request for
several answers into one for each.
"""
