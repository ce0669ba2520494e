"""The index as a service: follows a fleet's KV events and answers over HTTP which workers hold a prefix.

The API is that of Dynamo's standalone indexer. `registry` keeps one index a namespace (a model in a routing group) and
the instances that feed it; `bodies` parses requests and encodes answers; `restore` loads an index from another service
or process; `api` has the endpoints and `service` the whole, from one `IndexConfig`.
"""

from kvist.indexer.service.config import IndexConfig

__all__ = ["IndexConfig"]
