"""The router: OpenAI requests go to the worker where they cost least, by what its cache holds and what it has to do.

`policy` is the choice and `fleet` whom it chooses among, `index` what is known of their caches, `routing` one decision;
`forward` is a request's whole way, `prefill` its prompt computed by another worker first; `doors` is how it comes in.
"""

from kvist.router.config import RouterConfig

__all__ = ["RouterConfig"]
