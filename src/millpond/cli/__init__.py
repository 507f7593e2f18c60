"""The command line: a thin face of `Control`, and how errors are told to people.

An error is one line on stderr that begins with `millpond: `. Exit codes: 0 done, 1 the database or the messages
said no, 2 the command was wrong. Tracebacks only with `--debug`; passwords never.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import typer

from millpond.cli import bridge, demo, lake, lake_replay, lake_report, look, operate, publish, schema, streams, worker
from millpond.cli.app import Refused, app
from millpond.errors import MillpondError, StoreError

__all__ = ["COMMANDS", "main", "run"]

COMMANDS = (schema, publish, worker, look, operate, streams, bridge, lake, lake_report, lake_replay, demo)
"""Where the commands are; each registers itself."""

# Whichever click typer stands on, its own or the package, this is where its usage errors come from.
_WrongUsage: type[Exception] = typer.BadParameter.__mro__[2]


def main() -> NoReturn:
    """The command `millpond`."""
    logging.basicConfig(format="millpond: %(message)s")
    if sys.argv[1:2] != ["migrate"]:  # what is wrong with a set-up is told at set-up, not by every command
        logging.getLogger("millpond").setLevel(logging.ERROR)
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Do one command; returns the exit code."""
    try:
        return app(args=list(argv) or ["--help"], prog_name="millpond", standalone_mode=False) or 0
    except typer.Abort:
        return _tell("stopped", 130)
    except _WrongUsage as e:
        return _tell(e.format_message(), 2)  # type: ignore[attr-defined]
    except Exception as e:
        if "--debug" in argv:
            traceback.print_exc()
        if isinstance(e, Refused | StoreError):
            return _tell(str(e), 1)
        if isinstance(e, MillpondError):
            return _tell(str(e), 2)
        if isinstance(e, OSError) and e.filename is not None:
            return _tell(f"{e.filename}: {e.strerror}", 2)
        return _tell(f"{type(e).__name__}: {e} (this is a mistake in Millpond; --debug shows where)", 1)


def _tell(text: str, code: int) -> int:
    print("millpond:", " ".join(text.split()), file=sys.stderr)
    return code
