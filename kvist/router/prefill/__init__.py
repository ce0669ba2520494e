"""Prefill and decode apart: one worker computes a prompt, another goes on with it.

`handover` is whether that is worth it and how far it is; `dialect` is what engines' protocols have in common, and each
has a module: `kvist`, `vllm`, `sglang`, `trtllm`. `releases` tells a prefill worker what nobody will fetch.
"""
