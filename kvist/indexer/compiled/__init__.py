"""The indexer's compiled code: from bytes off the wire, or tokens of a prompt, to hashes and updates of the index.

As in `kvist.radix.compiled`, on which it builds, functions take arrays and no other Python objects. `words` reads
bytes, `hashing` hashes blocks, `json_tokens` parses prompts; `frames` splits a stream into messages, and `engine`
applies an engine's: `engine_events` parses one, `engine_blocks` maps an engine's hashes to blocks.
"""
