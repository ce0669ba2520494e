"""Attention over a paged KV cache: one op a module, each a Triton kernel, its launcher and a torch reference.

`write_kv` stores keys and values into their slots, `paged_attention` attends with one query token a sequence or a
ragged batch of them. CUDA tensors run the kernel, CPU tensors loops that Numba compiles (`loops_for`) or the reference
(no Triton needed). What Triton compiles depends on a layer's shape and on the cache, never on lengths or on the size of
a batch; `on_compile` reports it. A layer's cache, in 32, 16 or 8 bits, is
`[num_blocks, 2, num_kv_heads, block_size, head_dim]`, keys before values. Positions, lengths and windows are absolute.
A block table may lack pages in front: column `page - page_offset` holds the block of a page, and entries that no
visible key needs (evicted, absent) are never dereferenced.
"""

from kvist.kernels._triton import loops_for, on_compile
from kvist.kernels.paged_attention import paged_attention, paged_attention_reference
from kvist.kernels.write_kv import write_kv, write_kv_reference

__all__ = [
    "loops_for",
    "on_compile",
    "paged_attention",
    "paged_attention_reference",
    "write_kv",
    "write_kv_reference",
]
