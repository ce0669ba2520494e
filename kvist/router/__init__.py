"""The router: OpenAI requests go to the worker where they cost least, by what its cache holds and what it has to do.

`policy` is the choice and `fleet` whom it chooses among, `index` what is known of their caches, `routing` one decision;
`forward` is a request's whole way, `prefill` its prompt computed by another worker first; `doors` is how it comes in.
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
