"""Dialects: pure functions that decode engines' own messages into engine events.

vLLM and SGLang send msgpack batches over ZeroMQ (`block_events`); TensorRT-LLM is polled and hands out dicts
(`trtllm`). One malformed event never costs the others.
"""

from kvist.events.dialects.block_events import EngineEnvelope, decode_block_events
from kvist.events.engine_events import DecodedEngineBatch

__all__ = ["DecodedEngineBatch", "EngineEnvelope", "decode_block_events"]
