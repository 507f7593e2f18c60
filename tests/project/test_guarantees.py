"""Every sentence of the page of guarantees has its tests, named in `guarantees.toml`."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "guarantees.md"
NO_PROMISES = {"Not guaranteed", "When to use something else"}
"""Sections without guarantees. So is the introduction."""
WITHOUT_TESTS = ["definition", "advice"]
"""Kinds of sentences that promise nothing."""

TESTS = tomllib.loads((Path(__file__).parent / "guarantees.toml").read_text())
"""Heading, the first words of each sentence below it, and its tests or its kind."""


def sections(page: str) -> dict[str, list[str]]:
    """Heading and sentences. A sentence that ends with a colon only introduces a list."""
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    found = {}
    for section in page.split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        if heading not in NO_PROMISES:
            found[heading] = [sentence for block in blocks(text) for sentence in sentences(block)]
    return found


def blocks(text: str) -> Iterator[str]:
    """Paragraphs and items of lists, each in one line and without marks."""
    for block in re.split(r"\n\s*\n|\n(?=- )", text):
        line = " ".join(block.split()).removeprefix("- ").replace("**", "")
        line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
        if line:
            yield line


def sentences(line: str) -> list[str]:
    parts = re.split(r"(?<=\.)\)? (?=[A-Z`(*])", line)
    return [part for part in parts if not part.endswith(":")]


@cache
def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


PROMISES = sections(PAGE.read_text())


def test_every_section_is_there() -> None:
    assert list(TESTS) == list(PROMISES)


@pytest.mark.parametrize("heading", PROMISES)
def test_every_sentence_has_its_tests(heading: str) -> None:
    words = TESTS.get(heading, {})
    for sentence in PROMISES[heading]:
        assert len([start for start in words if sentence.startswith(start)]) == 1, sentence
    for start in words:
        assert len([sentence for sentence in PROMISES[heading] if sentence.startswith(start)]) == 1, start


@pytest.mark.parametrize("heading", TESTS)
def test_the_tests_exist(heading: str) -> None:
    for start, tests in TESTS[heading].items():
        if tests in WITHOUT_TESTS:
            continue
        assert isinstance(tests, list) and tests, start
        for test in tests:
            path, _, name = test.partition("::")
            assert name.startswith("test_"), test
            assert (ROOT / "tests" / path).is_file(), test
            assert name in functions(ROOT / "tests" / path), test


def test_the_page_is_read_by_sentences() -> None:
    page = (
        "# Title\n\nIntroduction.\n\n## One\n\nA `b` is. *C* is\nlong.\n\n- **D**: e. F:\n- [G](h).\n\n"
        "## Not guaranteed\n\nI.\n"
    )
    assert sections(page) == {"One": ["A `b` is.", "*C* is long.", "D: e.", "G."]}
