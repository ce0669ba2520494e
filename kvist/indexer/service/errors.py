"""What the API refuses."""

from __future__ import annotations

import msgspec

from kvist.errors import KvistError


class ApiError(KvistError):
    """A request that is not answered with 200 or 201; the message is for the client, who must act on it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    def body(self) -> bytes:
        """Return the answer's body."""
        return msgspec.json.encode({"error": self.message})
