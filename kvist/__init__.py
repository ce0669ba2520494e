"""KV-event publisher, prefix-aware router and windowed paged-attention engine for fleets of LLM workers."""

__version__ = "0.1.0"
