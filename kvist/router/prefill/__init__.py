"""Prefill and decode apart: one worker computes a prompt, another goes on with it.

`handover` is whether that is worth it, how far it is, and who is told that nobody will fetch a prompt; `dialect` is
what engines' protocols have in common, and each has a module: `vllm`, of which Kvist's is a kind, `sglang`, `trtllm`.
`several` puts answers together that were each a request.
"""
