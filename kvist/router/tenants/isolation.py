"""Keeps tenants from seeing into each other's caches: engines look up each group's blocks by a salt of its own.

A prompt then never hits what another group's prompts have left in a cache, so that nobody can learn from times or token
counts what others have asked. Requests to an endpoint that takes no salt are refused; a worker whose engine takes none
gets no requests.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from http import HTTPStatus
from typing import Final

from kvist.openai.chats import RESPONSES_PATH
from kvist.openai.errors import RequestError
from kvist.router.prompts import CHAT_PATH, COMPLETION_PATH
from kvist.router.tenants.tenant import Tenant

_SALTED: Final = frozenset({CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH})
_COMPUTING_NOTHING: Final = frozenset(
    {"/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/v1/messages/count_tokens"}
)


def takes_salt(path: str) -> bool:
    """Return whether a request of this endpoint gets a salt; raises RequestError (403) if the endpoint takes none."""
    if path not in _SALTED | _COMPUTING_NOTHING and not path.startswith(RESPONSES_PATH + "/"):
        message = f"{path}: its caches cannot be kept apart, expected one of {sorted(_SALTED)}"
        raise RequestError(HTTPStatus.FORBIDDEN, message, code="not_isolated")
    return path in _SALTED


def salt_of(secret: str, tenant: Tenant, given: str | None) -> str:
    """Return the salt for a tenant's prompt, of 43 characters; a `given` one separates prompts within its group.

    It is an HMAC-SHA-256, so that whoever knows the salt of one group cannot derive another's.
    """
    kind, name = ("tenant", tenant.name) if tenant.group is None else ("group", tenant.group)
    digest = hmac.digest(secret.encode(), "\0".join((kind, name, given or "")).encode(), "sha256")
    return urlsafe_b64encode(digest).rstrip(b"=").decode()
