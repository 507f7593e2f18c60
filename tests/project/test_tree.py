"""The map of the tests is complete, and the conformance suite uses public names only."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent.parent
INSIDE = {"backends.py", "rabbitmq.py", "model.py"}
"""Files of the conformance suite that may import the inside of a backend: they prepare it, or replace it."""
VALUES = {"millpond.clock", "millpond.errors", "millpond.message", "millpond.schedule"}
"""Values below the seam: times, errors, ids and limits."""


def test_the_map_names_every_folder_and_file() -> None:
    named = set(re.findall(r"`([\w./]+)`", "".join(first_cells(TESTS / "README.md"))))
    folders = {str(file.parent.relative_to(TESTS)) for file in TESTS.rglob("test_*.py")}
    files = {file.name for file in TESTS.iterdir() if file.suffix in (".py", ".json")}
    assert named == folders | files


def first_cells(path: Path) -> list[str]:
    return re.findall(r"^\| (`[^|]+) \|", path.read_text(), re.M)


def test_conformance_imports_public_names_only() -> None:
    found = {
        f"{file.name}: {module}"
        for file in (TESTS / "conformance").glob("*.py")
        if file.name not in INSIDE
        for module in imported(file)
        if module.startswith("millpond.") and not f"{module}.".startswith("millpond.seam.") and module not in VALUES
    }
    assert found == set()


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
