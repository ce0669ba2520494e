"""The index as a service: hears a fleet's KV events and answers over HTTP who holds a prefix.

The API is that of Dynamo's standalone indexer. `registry` keeps one index a namespace (a model in a routing group) and
the instances that feed it; `bodies` reads requests and `scores` writes what an index says; `restore` brings an index
from another service or process; `api` is the endpoints and `service` the whole, from one `IndexConfig`.
"""

from kvist.indexer.service.config import IndexConfig

__all__ = ["IndexConfig"]
