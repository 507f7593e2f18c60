"""A hook of mkdocs: SECURITY.md is a page of the documentation site too."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

FILE = Path(__file__).parents[1] / "SECURITY.md"


def on_files(files: Files, config: Any) -> None:
    """Add the page. Its links begin in the folder of the project, those of a page in docs/."""
    files.append(File.generated(config, "security.md", content=FILE.read_text().replace("](docs/", "](")))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links to the file lead to the page."""
    there = "../" * page.file.src_uri.count("/") + "security.md"
    return re.sub(r"\]\((?:\.\./)+SECURITY\.md", f"]({there}", markdown)
