"""What requests may not ask of this engine: nothing that would change an answer is ignored.

The names are those of vLLM 0.33's and OpenAI's requests that are read nowhere here. Unknown ones are left alone, as by
vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvist.openai.errors import RequestError
from kvist.openai.requests import Fields

LABELS = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
    }
)
"""What changes no answer, whoever gives it."""

REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "ec_transfer_params": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "length_penalty": (1.0,),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_payload": (),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "priority": (0,),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (),
    "web_search_options": (),
}
"""What this engine cannot do, and by which values, beside null, it is not asked for."""


REFUSED_OF_RESPONSES: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "enable_response_messages": (False,),
    "include": ([],),
    "max_tool_calls": (),
    "previous_input_messages": ([],),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": ({},),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""The same of responses alone."""


def check_fields(fields: Fields, refused: Mapping[str, tuple[Any, ...]] = REFUSED) -> None:
    """Raise RequestError (400) that names the first field which asks for what cannot be done."""
    for name, neutral in refused.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            message = f"{name}: got {value!r:.100}, expected it left out: this engine cannot do it"
            raise RequestError(400, message, param=name)
