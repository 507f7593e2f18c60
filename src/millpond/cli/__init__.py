"""The command line: one module per command; turns errors into one line and an exit code.

An error is one line on stderr that begins with `millpond: `. Exit codes: 0 done; 1 the database or the state of the
messages prevented it; 2 the command or its input was wrong. Tracebacks only with `--debug`; passwords never.
"""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import typer

from millpond.cli import secret_urls
from millpond.cli.app import Declined, app
from millpond.errors import MillpondError, StoreError

__all__ = ["main", "run_command"]

_COMMANDS = (
    *(
        "migrate",
        "publish",
        "run",
        "stats",
        "top",
        "list_messages",
        "show",
        "why",
        "retry",
        "replay",
        "reschedule",
        "done",
    ),
    *("cancel", "pause", "retain", "queue", "purge", "periodic", "streams", "shards", "serve", "tokens", "doctor"),
    *("bridge", "lake", "lake_report", "lake_replay", "demo"),
)
"""Modules in the order of the help text. Importing one registers its command."""
for _module in _COMMANDS:
    importlib.import_module(f"millpond.cli.{_module}")

# Base class of usage errors, in the click that typer uses: the vendored copy or the package.
_WrongUsage: type[Exception] = typer.BadParameter.__mro__[2]


def main() -> NoReturn:
    """The command `millpond`."""
    logging.basicConfig(format="millpond: %(message)s")
    if sys.argv[1:2] != ["migrate"]:  # warnings about the set-up appear at set-up, not at every command
        logging.getLogger("millpond").setLevel(logging.ERROR)
    sys.exit(run_command(sys.argv[1:]))


def run_command(argv: Sequence[str]) -> int:
    """Run one command and return the exit code."""
    secret_urls.forget()
    arguments, debug = _without_debug(argv)
    try:
        return app(args=arguments or ["--help"], prog_name="millpond", standalone_mode=False, obj=list(argv)) or 0
    except typer.Abort:
        return _fail("stopped", 130)
    except _WrongUsage as e:
        return _fail(e.format_message(), 2)  # type: ignore[attr-defined]
    except Exception as e:
        if debug:
            print(secret_urls.hide_secrets(traceback.format_exc()), end="", file=sys.stderr)
        if isinstance(e, Declined | StoreError):
            return _fail(str(e), 1)
        if isinstance(e, MillpondError):
            return _fail(str(e), 2)
        if isinstance(e, OSError) and e.filename is not None:
            return _fail(f"{e.filename}: {e.strerror}", 2)
        return _fail(f"{type(e).__name__}: {e} (this is a bug in Millpond; --debug shows where)", 1)


def _without_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Take `--debug` out, which may be anywhere: it is often added to the end of a command that failed."""
    end = argv.index("--") if "--" in argv else len(argv)
    kept = [argument for argument in argv[:end] if argument != "--debug"]
    return [*kept, *argv[end:]], len(kept) < end


def _fail(text: str, code: int) -> int:
    print("millpond:", secret_urls.hide_secrets(" ".join(text.split())), file=sys.stderr)
    return code
