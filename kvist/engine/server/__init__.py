"""The engine over HTTP, as OpenAI clients and vLLM's operators expect it.

`app` has the routes and metrics, `intake` turns a body into sequences to generate, `answers` turns their outputs into a
response or a stream of server-sent events.
"""
