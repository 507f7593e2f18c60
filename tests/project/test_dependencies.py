"""The packages that pyproject.toml declares are the packages that the source imports."""

import ast
import re
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"millpond", "pyspark_millpond"}
BY_DRIVERS = {"pandas"}
"""Imported by pyspark, which does not require it."""
BY_CALLERS = {"psycopg", "pymysql", "sqlalchemy", "aiosqlite", "django", "django_tasks", "asgiref", "fastapi"} | {
    "pytest",
    "pytest_asyncio",
}
"""Imported only for a caller who has installed it: to recognise a connection, as a part of Django, or in tests."""


def test_declared_packages_are_imported_ones() -> None:
    extras = [name for name in PROJECT["optional-dependencies"] if name not in ("all", "dev")]
    lines = [*PROJECT["dependencies"], *(line for name in extras for line in PROJECT["optional-dependencies"][name])]
    declared = {plain(re.split(r"[<>=\[ ]", line)[0]) for line in lines}
    distributions = packages_distributions()
    imported = {
        plain(distribution)
        for package in third_party(ROOT / "src") - BY_CALLERS
        for distribution in shipped_by(package, distributions, declared)
    }
    assert imported - declared == set()
    assert declared - imported == BY_DRIVERS


def shipped_by(package: str, distributions: Mapping[str, list[str]], declared: set[str]) -> list[str]:
    """Distributions of a package. Of a namespace that several share, those that are declared suffice."""
    all_of_them = distributions.get(package, [package])
    return [one for one in all_of_them if plain(one) in declared] or all_of_them


def test_rabbitmq_declares_its_drivers() -> None:
    needed = third_party(ROOT / "src" / "millpond" / "transports" / "rabbitmq") - {"msgspec"}
    declared = {re.split(r"[<>=]", line)[0] for line in PROJECT["optional-dependencies"]["rabbitmq"]}
    assert needed == declared == {"aiormq", "pamqp"}


def third_party(folder: Path) -> set[str]:
    """Top-level packages that the files of a folder import."""
    found = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.partition(".")[0])
    return found - OWN - sys.stdlib_module_names


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
