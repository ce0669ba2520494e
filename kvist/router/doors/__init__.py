"""How requests come in: OpenAI's API for clients, and the endpoints of operators.

`service` is the running router and dispatches each request; `auth` says who may do what, and `keeper` answers
operators. Gateways that carry requests themselves use `picker` (Envoy), `ray` or `embedded`. `page` is the live page.
Only `processes` builds on this.
"""
