"""The indexer's compiled code: from bytes off the wire, or tokens of a prompt, to hashes and updates of the index.

As in `kvist.radix.compiled`, on which it builds, functions take arrays; nothing here knows a socket, a session or a
Python object. `words` reads bytes, `hashing` names blocks, `json_tokens` reads prompts; `frames` splits a stream into
messages, and `engine` takes those that an engine sent: `engine_events` says what is in one, `engine_blocks` what an
engine's hash stands for.
"""
