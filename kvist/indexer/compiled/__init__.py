"""The indexer's compiled code: from bytes off the wire, or tokens of a prompt, to hashes and updates of the index.

As in `kvist.radix.compiled`, on which it builds, functions take addresses and integers; nothing here knows a socket, a
session or a Python object. `jit` compiles and caches, `intrinsics` adds what Numba lacks; `xxh3` and `hashing` name
blocks, `json_tokens` reads prompts and `answers` writes who holds them, `frames` splits a stream into messages, and
`canonical` takes those of Kvist's own.
"""
