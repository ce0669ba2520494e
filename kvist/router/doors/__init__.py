"""How requests come in: OpenAI's API for clients, administration, and why a decision falls.

`service.py` is the running router and hands each request to what it is for: `auth.py` says who may do what, `api.py`
holds the router's own endpoints. For those who carry requests themselves there are `picker.py` (Envoy), `ray.py` and
`embedded.py`. Nothing else in the router builds on this.
"""
