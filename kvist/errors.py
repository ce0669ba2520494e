"""The errors Kvist raises, split by who must act: the caller, the operator, or the peer.

Each carries its facts as fields; the message is made from them and names the field, the value and what was expected.
"""

from __future__ import annotations


class KvistError(Exception):
    """The base class of every error that Kvist raises on purpose."""


class InvalidValueError(KvistError, ValueError):
    """A value given by the caller is not allowed: fix the call, the flag or the configuration."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field}: got {value!r}, expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected


class MalformedMessageError(KvistError):
    """Bytes from a peer violate its protocol: count it, log it once a source, skip it."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"malformed message from {source}: {reason}")
        self.source = source
        self.reason = reason


class MissingExtraError(KvistError):
    """An optional dependency is not installed: the operator installs the extra named here."""

    def __init__(self, extra: str, module: str) -> None:
        super().__init__(f"{module} is not installed: pip install 'kvist[{extra}]'")
        self.extra = extra
        self.module = module
