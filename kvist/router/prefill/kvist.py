"""Kvist's own workers: vLLM's fields, with the first token in the params, so that no worker samples it twice."""

from __future__ import annotations

from kvist.router.prefill.vllm import VllmDialect


class KvistDialect(VllmDialect):
    """Hands a token over, and not its log probabilities."""

    hands_logprobs = False
