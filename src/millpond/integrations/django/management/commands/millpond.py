"""`manage.py millpond …`: every command of Millpond, with the database of the project."""

from __future__ import annotations

import os
import sys
from argparse import REMAINDER
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from millpond.cli import run_command
from millpond.integrations.django.import_path import PATH
from millpond.integrations.django.project import database_url, options

WORKER = "millpond.integrations.django.worker"
_DJANGOS = ("--settings", "--pythonpath")
"""Options of every command of manage.py, which it has obeyed already."""


class Command(BaseCommand):
    help = "Run workers (millpond run) or any other command of Millpond on the project's database."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("arguments", nargs=REMAINDER)

    def run_from_argv(self, argv: list[str]) -> None:
        """Pass all arguments on: the options are those of the command `millpond`."""
        if argv[2:3] in (["-h"], ["--help"]):
            super().run_from_argv(argv)
        sys.exit(self._run(_without_djangos(argv[2:])))

    def handle(self, *args: Any, **given: Any) -> None:
        if code := self._run([*args, *given["arguments"]]):
            raise CommandError(f"millpond ended with code {code}", returncode=code)

    def _run(self, arguments: list[str]) -> int:
        """`run` gets the module of the project's handlers, other commands the project's database."""
        if arguments[:1] == ["run"]:
            with _environment({PATH: os.pathsep.join(sys.path)}):
                return run_command(["run", WORKER, *arguments[1:]])
        with _environment(_the_projects()):
            return run_command(arguments)


def _without_djangos(arguments: Sequence[str]) -> list[str]:
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return [*kept, argument, *rest]
        if argument in _DJANGOS:
            next(rest, None)
        elif not argument.startswith(tuple(f"{name}=" for name in _DJANGOS)):
            kept.append(argument)
    return kept


def _the_projects() -> dict[str, str | None]:
    """The variables of the database and its options. None: not set, whatever this process has."""
    given = {name: str(value) for name, value in options().items() if isinstance(value, str | int | float)}
    given.pop("migrate", None)  # commands never migrate
    schema, prefix = given.pop("schema", None), given.pop("table_prefix", None)
    return {
        "MILLPOND_URL": database_url(),
        "MILLPOND_SCHEMA": schema,
        "MILLPOND_TABLE_PREFIX": prefix,
        "MILLPOND_OPTIONS": " ".join(f"{name}={value}" for name, value in given.items()) or None,
    }


@contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables for a command that is called. They have a password, which other processes must not inherit."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
