"""Short traces for Spark: it prints all frames of an error in Python, in its log and again in its own exception."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from millpond.errors import MillpondError

F = TypeVar("F", bound=Callable[..., Any])


def short_trace(method: F) -> F:
    """A method whose Millpond errors have no frames below it and no cause: their text has the remedy."""

    @functools.wraps(method)
    def short(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except MillpondError as e:
            raise e.with_traceback(None) from None

    return cast(F, short)
