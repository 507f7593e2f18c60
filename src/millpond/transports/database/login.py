"""What a server's URL and the options say of logging in: TLS, and how long to try."""

from __future__ import annotations

import ssl

from millpond.clock import SECOND, micros
from millpond.errors import InvalidOption, InvalidURL
from millpond.transports.database.options import StoreOptions
from millpond.transports.url import Url

CONNECT_TIMEOUT = 10.0


def call_timeout(options: StoreOptions) -> float:
    return micros(options.call_timeout, "call_timeout") / SECOND


def connect_timeout(options: StoreOptions) -> float:
    return min(CONNECT_TIMEOUT, call_timeout(options))


def tls_context(url: Url, options: StoreOptions) -> ssl.SSLContext | None:
    """By the option, or by `ssl=true&ssl_ca=…&ssl_cert=…&ssl_key=…`, as MySQL's tools name them."""
    query = url.query
    if options.tls is not None:
        if query:
            raise InvalidOption("give either the option tls or ssl parameters in the URL, not both")
        return ssl.create_default_context() if options.tls is True else options.tls or None
    wanted = query.get("ssl", "true" if query else "false").lower()
    if wanted not in ("true", "false"):
        raise InvalidURL(f"ssl in the URL {url} must be true or false")
    if wanted == "false":
        return None
    try:
        context = ssl.create_default_context(cafile=query.get("ssl_ca"))
        if "ssl_cert" in query:
            context.load_cert_chain(query["ssl_cert"], query.get("ssl_key"))
    except (ssl.SSLError, OSError) as e:
        raise InvalidURL(f"the certificates that the URL {url} names cannot be read: {e}") from e
    return context


def is_untrusted(error: BaseException | None) -> bool:
    """Whether a handshake failed for good: not because somebody hung up in its middle."""
    return isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
