"""The router: sends OpenAI requests to the worker where they cost least, by its cache and its load.

`policy` chooses, `fleet` has the workers, `index` knows their caches, and `routing` makes a decision of all three.
`forward` takes a request from its body to the end of its answer, `prefill` has a prompt computed by another worker
first, and `doors` are the ways in which requests come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.router.config import RouterConfig

if TYPE_CHECKING:
    from kvist.router.doors.embedded import RoutedRequest, Router

__all__ = ["RoutedRequest", "Router", "RouterConfig"]


def __getattr__(name: str) -> object:
    """Import the router when it is asked for: a configuration needs none of it."""
    if name not in __all__:
        raise AttributeError(name)
    from kvist.router.doors import embedded

    return getattr(embedded, name)
