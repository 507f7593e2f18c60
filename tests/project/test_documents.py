"""Every example in the documents runs.

The blocks of one file run in order, in an empty folder, and share their names; `python` blocks may await.
`bash` blocks run too (`sh` blocks are for reading only). A comment of the form

    <!-- python
    …
    -->

is run and not shown: it sets up the surroundings of an example. URLs of servers are replaced by those of the test
servers.
"""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
FILES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SERVERS = {
    "postgresql://user:password@localhost/shop": "postgres_url",
    "mysql://user:password@localhost/shop": "mariadb_url",
}

_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>python|bash)[^\n]*\n(?P<code>.*?)^ *```$|^<!-- python\n(?P<hidden>.*?)^-->$",
    re.S | re.M,
)


class Block(NamedTuple):
    language: str
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    found = []
    for match in _BLOCK.finditer(text):
        code = match["hidden"] or match["code"]
        indent = len(match["indent"] or "")
        code = "".join(line[indent:] if line.strip() else "\n" for line in code.splitlines(keepends=True))
        found.append(Block(match["language"] or "python", code, text[: match.start()].count("\n") + 1))
    return found


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def needs_server(path: Path) -> bool:
    return any(url in path.read_text() for url in SERVERS)


WITH_EXAMPLES = [
    pytest.param(path, marks=pytest.mark.server if needs_server(path) else (), id=str(path.relative_to(ROOT)))
    for path in FILES
    if blocks(path.read_text())
]


@pytest.mark.parametrize("path", WITH_EXAMPLES)
async def test_examples_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = path.read_text()
    for url, fixture in SERVERS.items():
        if url in text:
            text = text.replace(url, request.getfixturevalue(fixture))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MILLPOND_URL", raising=False)
    module: dict[str, Any] = {"__name__": "example"}
    for block in blocks(text):
        if block.language == "bash":
            run_shell(block, path)
        else:
            await run_python(block, path, module)


async def run_python(block: Block, path: Path, module: dict[str, Any]) -> None:
    # With the line numbers of the document, for tracebacks.
    code = "\n" * block.line + block.code
    compiled = compile(code, str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    result = eval(compiled, module)  # noqa: S307 - our own documents, which is the point of this test
    if inspect.iscoroutine(result):
        await result


def run_shell(block: Block, path: Path) -> None:
    environment = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"{path}:{block.line}\n{block.code}\n{done.stdout}{done.stderr}"


def test_commands_of_the_readme_work_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer tries them one by one. Only the tables come first."""
    handler, commands = [block for block in blocks((ROOT / "README.md").read_text()) if block.language == "bash"]
    url, migrate, *others = commands.code.strip().splitlines()
    assert (url, migrate, len(others)) == ("export MILLPOND_URL=sqlite:///orders.db", "millpond migrate", 4)
    for number, order in enumerate((reversed(others), [*others[2:], *others[:2]])):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        for block in (handler, Block("bash", "\n".join([url, migrate, *order, migrate]), commands.line)):
            run_shell(block, ROOT / "README.md")


def test_the_python_of_the_readme_runs_as_a_script(tmp_path: Path) -> None:
    (code,) = [block.code for block in blocks((ROOT / "README.md").read_text()) if block.language == "python"]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "orders.db").exists()


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target
