"""What clients are met with and workers are shown, from files that may be replaced while the router runs."""

from __future__ import annotations

import ssl

from kvist.errors import InvalidValueError
from kvist.http import UpstreamLimits, UpstreamPool
from kvist.router.config import RouterConfig


class Certificates:
    """The contexts of one process. All methods raise InvalidValueError that names what cannot be read."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._shown: list[tuple[ssl.SSLContext, str, str]] = []
        """Each with the fields that name the certificate it shows and the key."""

    def for_clients(self) -> ssl.SSLContext | None:
        """Return what clients are met with, None for plain HTTP."""
        if self._config.tls_certificate is None:
            return None
        context = self._context(ssl.Purpose.CLIENT_AUTH, "client_ca", "tls_certificate", "tls_key")
        if self._config.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def worker_pool(self) -> UpstreamPool:
        """Return a pool whose workers with https are met as the configuration says."""
        config, context = self._config, None
        limits = UpstreamLimits(
            connect_timeout_s=config.connect_timeout_s,
            first_byte_timeout_s=config.first_byte_timeout_s,
            idle_timeout_s=config.idle_timeout_s,
        )
        if config.worker_ca is not None or config.worker_certificate is not None:
            context = self._context(ssl.Purpose.SERVER_AUTH, "worker_ca", "worker_certificate", "worker_key")
        return UpstreamPool(limits, tls=context)

    def renew(self, config: RouterConfig) -> None:
        """Read the files again."""
        for context, certificate, key in self._shown:
            _show_certificate(context, config, certificate, key)

    def _context(self, purpose: ssl.Purpose, authority: str, certificate: str, key: str) -> ssl.SSLContext:
        """Return a context of the files in these fields.

        Without an authority the system says which servers are trusted, and clients need not be.
        """
        path = getattr(self._config, authority)
        try:
            context = ssl.create_default_context(purpose, cafile=path)
        except OSError as error:
            raise InvalidValueError(authority, path, f"a readable PEM file ({error})") from None
        _show_certificate(context, self._config, certificate, key)
        self._shown.append((context, certificate, key))
        return context


def _show_certificate(context: ssl.SSLContext, config: RouterConfig, certificate: str, key: str) -> None:
    """Have a context show the certificate in these fields, if any, from now on; raises InvalidValueError."""
    path = getattr(config, certificate)
    try:
        # One that takes the certificate and not the key, as when files are being replaced, can do nothing any more.
        for each in (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), context) if path is not None else ():
            each.load_cert_chain(path, getattr(config, key))
    except OSError as error:  # ssl.SSLError is one
        raise InvalidValueError(certificate, path, f"readable PEM files ({error})") from None
