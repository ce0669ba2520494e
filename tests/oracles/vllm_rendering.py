"""vLLM's own files make a prompt's text of a request's body; `make engines` fetches them."""

from __future__ import annotations

import importlib
from functools import cache
from types import SimpleNamespace
from typing import Any

from _engine_files import engine_files, quiet_logger

_CHAT = "vllm.entrypoints.openai.chat_completion.protocol"
_RESPONSES = "vllm.entrypoints.openai.responses"
_REAL = (
    "vllm.envs",
    "vllm.exceptions",
    "vllm.renderers.chat_utils",
    "vllm.renderers.chat_utils.chat_message",
    "vllm.renderers.chat_utils.types",
    "vllm.renderers.hf",
    "vllm.renderers.params",
    "vllm.tool_parsers.utils",
    "vllm.entrypoints.anthropic.protocol",
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.generate.base.protocol",
    "vllm.entrypoints.serve.engine.protocol",
    "vllm.entrypoints.serve.tokenize.protocol",
    _CHAT,
    f"{_RESPONSES}.protocol",
    f"{_RESPONSES}.utils",
)
_OUTSIDE = {"torch", "PIL", "openai_harmony", "partial_json_parser", "fastapi"}
_MODEL = SimpleNamespace(enable_prompt_embeds=False, multimodal_config=None)


@cache
def _files() -> SimpleNamespace:
    played: dict[str, dict[str, Any]] = {"vllm.logger": {"init_logger": quiet_logger}}
    with engine_files("vllm", _REAL, _OUTSIDE, played):
        real = importlib.import_module("vllm.renderers.params")
        names = ("ChatParams", "TokenizeParams", "map_reasoning_effort", "merge_kwargs")
        vars(importlib.import_module("vllm.renderers")).update({name: getattr(real, name) for name in names})
        modules = {
            "chat": importlib.import_module(_CHAT),
            "messages": importlib.import_module("vllm.renderers.chat_utils.chat_message"),
            "hf": importlib.import_module("vllm.renderers.hf"),
            "anthropic": importlib.import_module("vllm.entrypoints.anthropic.serving"),
            "anthropic_protocol": importlib.import_module("vllm.entrypoints.anthropic.protocol"),
            "responses": importlib.import_module(f"{_RESPONSES}.utils"),
            "tokenize": importlib.import_module("vllm.entrypoints.serve.tokenize.protocol"),
            "responses_protocol": importlib.import_module(f"{_RESPONSES}.protocol"),
        }
    return SimpleNamespace(**modules)


def text_of_chat(body: dict[str, Any], tokenizer: Any) -> str:
    """Return the prompt of a body of `/v1/chat/completions`, to a model with a tokeniser of transformers."""
    request = _files().chat.ChatCompletionRequest.model_validate(body)
    return _rendered(request, request.messages, request.tools, tokenizer)


def text_of_tokenize(body: dict[str, Any], tokenizer: Any) -> str:
    """Return what a body of `/tokenize` has tokenised."""
    protocol = _files().tokenize
    if "prompt" in body:
        prompt: str = protocol.TokenizeCompletionRequest.model_validate(body).prompt
        return prompt
    request = protocol.TokenizeChatRequest.model_validate(body)
    return _rendered(request, request.messages, request.tools, tokenizer)


def text_of_messages(body: dict[str, Any], tokenizer: Any) -> str:
    """Return that of `/v1/messages`."""
    anthropic = _files().anthropic
    serving = anthropic.AnthropicServingMessages
    asked = _files().anthropic_protocol.AnthropicMessagesRequest.model_validate(body)
    is_merged = serving._detect_merge_inline_system(tokenizer.chat_template)
    effort = _effort_without_thinking(tokenizer) if asked.thinking and asked.thinking.type == "disabled" else "none"
    chat = serving.to_chat_completion_request(asked, merge_inline_system=is_merged, disabled_thinking_effort=effort)
    return _rendered(chat, chat.messages, chat.tools, tokenizer)


def text_of_response(body: dict[str, Any], tokenizer: Any, *earlier: tuple[dict[str, Any], list[Any]]) -> str:
    """Return that of `/v1/responses`, going on with the last of earlier bodies and what was answered."""
    responses, protocol = _files().responses, _files().responses_protocol
    previous, output = None, None
    for asked, answered in [*earlier, (body, [])]:
        request = protocol.ResponsesRequest.model_validate(asked)
        messages = responses.construct_input_messages(
            request_instructions=request.instructions,
            request_input=request.input,
            prev_msg=previous,
            prev_response_output=output,
        )
        said = [each for each in answered if each["type"] == "message"]
        previous, output = messages, [responses.ResponseOutputMessage.model_validate(each) for each in said]
    tools = responses.construct_tool_dicts(request.tools, request.tool_choice)
    return _rendered(request, messages, tools, tokenizer)


def _rendered(request: Any, messages: list[Any], tools: list[Any] | None, tokenizer: Any) -> str:
    files, template = _files(), tokenizer.chat_template
    dumped = None if tools is None else [each if isinstance(each, dict) else each.model_dump() for each in tools]
    params = request.build_chat_params(template, "auto").with_defaults({"tools": dumped, "tokenize": False})
    content_format = files.hf._detect_content_format(template, default="string")
    conversation: list[Any] = []
    for message in messages:
        conversation += files.messages.parse_chat_message_content(message, _Items(), content_format, False)
    files.messages._postprocess_messages(conversation)
    kwargs = params.get_apply_chat_template_kwargs()
    return files.hf.safe_apply_chat_template(_MODEL, tokenizer, conversation, **kwargs)


def _effort_without_thinking(tokenizer: Any) -> str:
    def rendered(effort: str) -> str:
        chat = _files().chat.ChatCompletionRequest(
            messages=[{"role": "user", "content": "Hi"}], reasoning_effort=effort
        )
        return _rendered(chat, chat.messages, None, tokenizer)

    none = rendered("none")
    return "low" if none in map(rendered, ("low", "medium", "high", "xhigh", "max")) else "none"


class _Items:
    """Tracks the images of a conversation that has none."""

    def create_parser(self, **_options: Any) -> Any:
        return SimpleNamespace(model_config=_MODEL, mm_placeholder_storage=dict)
