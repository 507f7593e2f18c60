"""Removes secrets from texts that are logged, printed or stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

Redact = Callable[[str], str]
"""Returns a text without its secrets."""

MASK = "***"
REMOVED = "(removed: the redact function of the pond failed)"
_SHORTEST = 4
"""Characters: a shorter secret is masked only in its place in a URL, because it is part of ordinary words."""
_LOGIN = re.compile(r"(://[^\s:/?#@]*):[^\s/@]*@")
_STRINGS = [rf"{quote}(?:[^{quote}\\]|\\[\s\S])*{quote}" for quote in "'\""]
_ESCAPED = [rf"\\{quote}(?:[^{quote}\\]|\\\\(?:\\[\s\S]|[^\\])|\\[^{quote}\\])*\\{quote}" for quote in "'\""]
_QUOTED = f"[burf]{{0,2}}(?:{'|'.join(_STRINGS + _ESCAPED)})"
"""A string of a program or of JSON, also inside of another string: there its quotes are escaped."""
_NAME = "(?:password|passwd|pwd)"
_PARAMETER = re.compile(rf"(?<!\w)(\w*{_NAME}\s*=\s*)(?:{_QUOTED}|[^\s&;,'\"]+)", re.IGNORECASE)
_ITEM = re.compile(rf"""((\\?['"])[\w.-]*{_NAME}\2\s*:\s*){_QUOTED}""", re.IGNORECASE)
"""Of a dict or of JSON."""


def forms(secret: str, *written: str) -> set[str]:
    """The secret as it is, as `written` in a URL, and in the usual percent-encoded forms."""
    from urllib.parse import quote, quote_plus  # only for a program with a URL

    return {secret, *written, quote(secret), quote(secret, safe=""), quote_plus(secret)} - {""}


def hide(text: str, secrets: Iterable[str] = ()) -> str:
    """The text without these secrets, without passwords of URLs, and without values of `password=` and `"password":`.

    >>> hide("no answer from amqp://shop:hunter2@mq/v?password=hunter3")
    'no answer from amqp://shop:***@mq/v?password=***'
    """
    for secret in sorted(secrets, key=len, reverse=True):  # a secret may be part of another
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, MASK)
    if "://" in text:
        text = _LOGIN.sub(rf"\1:{MASK}@", text)
    if "=" in text:
        text = _PARAMETER.sub(rf"\1{MASK}", text)
    return _ITEM.sub(rf"\1{MASK}", text) if ":" in text else text


def redaction(secrets: Iterable[str], function: Redact | None) -> Redact:
    """`hide` with these secrets, then the function. A text for which the function fails is removed."""
    known = tuple(secrets)

    def redact(text: str) -> str:
        text = hide(text, known)
        if function is None:
            return text
        try:
            result = function(text)
        except Exception:
            return REMOVED  # not logged: the error may quote the text
        return result if isinstance(result, str) else REMOVED

    return redact
