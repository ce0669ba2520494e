"""Dialects: what engines say, made into engine events by pure functions.

vLLM and SGLang send msgpack batches over ZeroMQ and share a decoder (`block_events`) but for the field order of their
older, positional form. TensorRT-LLM is polled and hands out dicts. One malformed event never costs the others.
"""

from kvist.events.dialects.batch import DecodedEngineBatch

__all__ = ["DecodedEngineBatch"]
