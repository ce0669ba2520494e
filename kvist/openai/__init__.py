"""What router and engine both speak: OpenAI's requests and responses, chat templates, tokens, server-sent events.

A body becomes a request (`requests`), a request becomes text by the model's chat template (`chat_template`) and tokens
(`tokenization`), the same in the router as in the worker, so that both hash the same blocks. Answers and their
events are in `responses`, refusals in `errors`.
"""
