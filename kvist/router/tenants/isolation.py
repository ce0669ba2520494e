"""Caches that tenants cannot see into: each group's blocks have a salt of their own, by which engines look them up.

What one group's prompts have left in a cache then spares another's nothing, so that nobody learns from times or counts
what others have asked. Where an endpoint takes no salt, it is refused; a worker whose engine takes none gets nothing.
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
    """Return whether a request of this endpoint is to have a salt; raises RequestError (403) where none would help."""
    if path not in _SALTED | _COMPUTING_NOTHING and not path.startswith(RESPONSES_PATH + "/"):
        message = f"{path}: its caches cannot be kept apart, expected one of {sorted(_SALTED)}"
        raise RequestError(HTTPStatus.FORBIDDEN, message, code="not_isolated")
    return path in _SALTED


def salt_of(secret: str, tenant: Tenant, given: str | None) -> str:
    """Return the salt for a prompt of the tenant's, of 43 characters; one that is given tells prompts of a group apart.

    It is HMAC-SHA-256, so that whoever knows the salt of one group cannot make another's.
    """
    kind, name = ("tenant", tenant.name) if tenant.group is None else ("group", tenant.group)
    digest = hmac.digest(secret.encode(), "\0".join((kind, name, given or "")).encode(), "sha256")
    return urlsafe_b64encode(digest).rstrip(b"=").decode()
