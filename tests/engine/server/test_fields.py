"""Every field of vLLM's requests is honoured or refused by name."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from _engine_files import FOLDER, MISSING, versions

from kvist.engine.server.fields import REFUSED
from kvist.engine.server.intake import AnswerOptions
from kvist.engine.server.tools import ToolChoice
from kvist.openai.requests import ChatCompletionRequest, CompletionRequest, SamplingParams

PATHS = {"ChatCompletionRequest": "chat_completion", "CompletionRequest": "completion"}
READ_APART = {"kv_transfer_params", "response_format", "structured_outputs", "add_special_tokens"}
VLLM = {
    "ChatCompletionRequest": """add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt
        chat_template chat_template_kwargs continue_final_message documents ec_transfer_params echo frequency_penalty
        ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias
        logprob_token_ids logprobs max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens mm_payload
        mm_processor_kwargs model n parallel_tool_calls presence_penalty priority prompt_logprobs reasoning_effort
        repetition_detection repetition_penalty request_id response_format return_mm_kwargs return_prompt_text
        return_token_ids return_token_offsets return_tokens_as_token_ids return_weight_versions
        routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop
        stop_token_ids stream stream_interval stream_options structured_outputs temperature thinking_token_budget
        tool_choice tools top_k top_logprobs top_p truncate_prompt_tokens truncation_side use_beam_search user
        vllm_xargs watermarking""",
    "CompletionRequest": """add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo
        frequency_penalty ignore_eos include_stop_str_in_output kv_transfer_params length_penalty logit_bias
        logprob_token_ids logprobs max_tokens min_p min_tokens mm_payload model n presence_penalty priority prompt
        prompt_embeds prompt_logprobs repetition_detection repetition_penalty request_id response_format
        return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids return_weight_versions
        routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop
        stop_token_ids stream stream_interval stream_options structured_outputs suffix temperature
        thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs
        watermarking""",
}
"""What vLLM 0.33's requests have (`vllm/entrypoints/openai/*/protocol.py`)."""

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
"""What changes no answer, whoever gives it: it is ignored."""


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_each_field_is_read_or_refused(kind: type[Any]) -> None:
    read = {*kind.__struct_fields__, *SamplingParams.__struct_fields__, *AnswerOptions.__struct_fields__, *READ_APART}
    if kind is ChatCompletionRequest:
        read |= {*ToolChoice.__struct_fields__}
    assert not read & (LABELS | REFUSED.keys())
    assert set(VLLM[kind.__name__].split()) <= read | LABELS | REFUSED.keys()


@pytest.mark.skipif(not versions(), reason=MISSING)
@pytest.mark.parametrize("kind", VLLM)
def test_the_fields_are_vllms(kind: str) -> None:
    source = (FOLDER / "vllm/entrypoints/openai" / PATHS[kind] / "protocol.py").read_text()
    classes = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.ClassDef) and each.name == kind]
    names = {each.target.id for each in classes[0].body if isinstance(each, ast.AnnAssign)}  # type: ignore[union-attr]
    assert {name for name in names if not name.startswith("_")} == set(VLLM[kind].split())


def test_what_cannot_be_done_is_refused_by_name_and_what_asks_for_nothing_is_not(post) -> None:
    for name in REFUSED:
        error = post("/v1/completions", {"prompt": "x", "max_tokens": 1, name: [3]}).json()["error"]
        assert (error["param"], error["message"][: len(name) + 6]) == (name, f"{name}: got ")
    ask = {"prompt": "x", "max_tokens": 1, "unknown": 7, **dict.fromkeys(LABELS, "x")}
    assert post("/v1/completions", ask | dict.fromkeys(REFUSED)).status_code == 200
    assert (
        post("/v1/completions", ask | {name: given[0] for name, given in REFUSED.items() if given}).status_code == 200
    )
