"""The engine over HTTP, compatible with OpenAI's clients and vLLM's endpoints.

`api` has the endpoints and metrics. `intake` turns a body into sequences to generate: `fields` has the fields that are
refused, `structured` and `tools` the grammars that an output follows. `answers` turns outputs into a response or a
stream of server-sent events, `other_apis` into those of Anthropic's messages and OpenAI's responses.
"""
