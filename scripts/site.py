"""A hook of mkdocs: files outside of docs/ to which its pages link are pages of the site too.

A folder with a README, such as an example, is one page with all its files.
"""

import re
from pathlib import Path, PurePosixPath
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#\s:]+)")
"""A link without a scheme."""
LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".mjs": "javascript",
    ".yaml": "yaml",
    ".json": "json",
    ".service": "ini",
    ".proto": "protobuf",
    "": "dockerfile",
}
"""Files of a folder that are shown, by the endings of their names."""
added: dict[str, str] = {}
"""Pages of the site that are not in docs/, and the file or folder of each."""


def on_files(files: Files, config: Any) -> None:
    """Add the pages to which others lead, and those to which they lead in turn."""
    todo = [page.src_uri for page in files.documentation_pages()]
    for uri in todo:
        text = _text(added[uri]) if uri in added else (ROOT / "docs" / uri).read_text()
        for found in LINK.finditer(text):
            target = normpath(join(_folder(uri), found[1]))
            if (page := _page_of(target)) is not None and page not in added and not target.startswith("docs/"):
                added[page] = _source(target)
                todo.append(page)
    for uri, source in added.items():
        files.append(File.generated(config, uri, content=_text(source)))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links to these files lead to their pages."""
    here = page.file.src_uri

    def link(found: re.Match[str]) -> str:
        target = _page_of(normpath(join(_folder(here), found[1])))
        return found[0] if target is None else f"]({relpath(target, dirname(here) or '.')}"

    return LINK.sub(link, markdown)


def _folder(uri: str) -> str:
    """The folder of the project in which the links of a page begin."""
    if uri not in added:
        return join("docs", dirname(uri))
    return added[uri] if (ROOT / added[uri]).is_dir() else dirname(added[uri])


def _page_of(target: str) -> str | None:
    """The page of a file or folder of the project; None if there is no such file."""
    if target.startswith("..") or not (ROOT / target).exists():
        return None
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return _source(target).removesuffix(".md").lower() + ".md"


def _source(target: str) -> str:
    """The folder with a README in which a file is, otherwise the file."""
    path = PurePosixPath(target)
    folders = [one for one in (path, *path.parents) if one.name and (ROOT / one / "README.md").exists()]
    return str(folders[-1] if folders else path)


def _text(source: str) -> str:
    """The Markdown of a page."""
    path = ROOT / source
    if path.is_dir():
        shown = [file for file in sorted(path.rglob("*")) if file.suffix in LANGUAGES and _has_text(file)]
        return "\n".join([(path / "README.md").read_text(), *(_code(file, f"## {file.name}") for file in shown)])
    return path.read_text() if path.suffix == ".md" else _code(path, f"# {path.name}")


def _has_text(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0 and "__pycache__" not in path.parts


def _code(path: Path, title: str) -> str:
    return f"{title}\n\n````{LANGUAGES[path.suffix]}\n{path.read_text().rstrip()}\n````\n"
