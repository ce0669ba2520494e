"""The router: OpenAI requests go to the worker where they cost least, by what its cache holds and what it has to do.

`forward` is the life of one request, `policy` the choice, `load` and `fleet` what it is made from, `index` what is
known of the caches; `service` builds it all from one `config`. `http` is the data path, `api` the admin endpoints.
"""

from kvist.router.config import RouterConfig

__all__ = ["RouterConfig"]
