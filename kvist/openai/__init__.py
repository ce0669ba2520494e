"""OpenAI's API, for router and engine: requests and responses, chat templates, tokens, server-sent events.

A body becomes a request (`requests`; other APIs' requests by `chats`), a request becomes text by the model's chat
template (`chat_template`) and then tokens (`tokenization`), the same in the router as in the worker, so that both hash
the same blocks. Answers and their events are in `responses`, errors in `errors`.
"""
