"""TLS contexts for clients and for workers, from files that may be replaced while the router runs."""

from __future__ import annotations

import ssl

from kvist.errors import InvalidValueError
from kvist.http import UpstreamLimits, UpstreamPool
from kvist.router.config import RouterConfig


class Certificates:
    """The contexts of one process. All methods raise InvalidValueError, which names the file that cannot be read."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._contexts: list[tuple[ssl.SSLContext, str, str]] = []
        """Each context with the configuration's fields that name its certificate and its key."""

    def for_clients(self) -> ssl.SSLContext | None:
        """Return the context for the router's port, None for plain HTTP."""
        if self._config.tls_certificate is None:
            return None
        context = self._context(ssl.Purpose.CLIENT_AUTH, "client_ca", "tls_certificate", "tls_key")
        if self._config.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def worker_pool(self) -> UpstreamPool:
        """Return a pool of connections to workers, with TLS for those with https as configured."""
        config, context = self._config, None
        limits = UpstreamLimits(
            connect_timeout_s=config.connect_timeout_s,
            first_byte_timeout_s=config.first_byte_timeout_s,
            idle_timeout_s=config.idle_timeout_s,
        )
        if config.worker_ca is not None or config.worker_certificate is not None:
            context = self._context(ssl.Purpose.SERVER_AUTH, "worker_ca", "worker_certificate", "worker_key")
        return UpstreamPool(limits, tls=context)

    def renew(self) -> None:
        """Read the files again."""
        for context, certificate, key in self._contexts:
            self._load_certificate(context, certificate, key)

    def _context(self, purpose: ssl.Purpose, authority: str, certificate: str, key: str) -> ssl.SSLContext:
        """Return a context of the files in these fields.

        Without an authority, servers are verified by the system's, and clients are not verified.
        """
        path = getattr(self._config, authority)
        try:
            context = ssl.create_default_context(purpose, cafile=path)
        except OSError as error:
            raise InvalidValueError(authority, path, f"a readable PEM file ({error})") from None
        self._load_certificate(context, certificate, key)
        self._contexts.append((context, certificate, key))
        return context

    def _load_certificate(self, context: ssl.SSLContext, certificate: str, key: str) -> None:
        """Load the certificate of these fields, if there is one, into a context."""
        path = getattr(self._config, certificate)
        try:
            # Another context tries it first: one that has loaded a certificate but not its key is of no use any more.
            for each in (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), context) if path is not None else ():
                each.load_cert_chain(path, getattr(self._config, key))
        except OSError as error:  # ssl.SSLError is one
            raise InvalidValueError(certificate, path, f"readable PEM files ({error})") from None
