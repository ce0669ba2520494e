"""The engine over HTTP, as OpenAI clients and vLLM's operators expect it.

`app` has the routes and metrics. `intake` turns a body into sequences to generate: `fields` has what cannot be asked,
`structured`, `structural_tags` and `tools` the grammars that an output follows. `answers` turns outputs into a response
or a stream of server-sent events, `messages` and `responses` into those of the APIs that have other words for it.
"""
