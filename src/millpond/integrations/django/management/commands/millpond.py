"""`manage.py millpond …`: every command of Millpond, with the database of the project."""

from __future__ import annotations

import os
import sys
from argparse import REMAINDER
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from millpond.cli import run_command
from millpond.integrations.django.project import database_url, options

WORKER = "millpond.integrations.django.worker"


class Command(BaseCommand):
    help = "Run workers (millpond run) or any other command of Millpond on the project's database."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("arguments", nargs=REMAINDER)

    def run_from_argv(self, argv: list[str]) -> None:
        """Pass all arguments on: the options are those of the command `millpond`."""
        if argv[2:3] in (["-h"], ["--help"]):
            super().run_from_argv(argv)
        sys.exit(self._run(argv[2:]))

    def handle(self, *args: Any, **given: Any) -> None:
        if code := self._run([*args, *given["arguments"]]):
            raise CommandError(f"millpond ended with code {code}", returncode=code)

    def _run(self, arguments: list[str]) -> int:
        """`run` gets the module of the project's handlers, other commands the project's database."""
        if arguments[:1] == ["run"]:
            return run_command(["run", WORKER, *arguments[1:]])
        os.environ.setdefault("MILLPOND_URL", database_url())
        given = {name: value for name, value in options().items() if isinstance(value, str | int | float)}
        for name in ("schema", "table_prefix"):
            if name in given:
                os.environ.setdefault(f"MILLPOND_{name.upper()}", str(given.pop(name)))
        given.pop("migrate", None)  # commands never migrate
        if given:
            os.environ.setdefault("MILLPOND_OPTIONS", " ".join(f"{name}={value}" for name, value in given.items()))
        return run_command(arguments)
