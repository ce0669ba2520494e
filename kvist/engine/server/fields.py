"""The fields of vLLM 0.33's and OpenAI's requests that this engine refuses, because it cannot do what they ask.

No known field that would change an answer is ignored; unknown fields are ignored, as by vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvist.openai.errors import invalid_field
from kvist.openai.requests import Fields

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
"""Fields of any request, and the values that, like null, ask for nothing."""

REFUSED_OF_RESPONSES: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "enable_response_messages": (False,),
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "previous_input_messages": ([],),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": ({},),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""The same for requests to /v1/responses alone."""


def check_fields(fields: Fields, refused: Mapping[str, tuple[Any, ...]] = REFUSED) -> None:
    """Raise RequestError (400) that names the first field that asks for something this engine cannot do."""
    for name, neutral in refused.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            raise invalid_field(name, f"got {value!r:.100}, expected it left out: this engine cannot do it")
