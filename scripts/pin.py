"""Print pins with the hashes of their files, for constraints.txt.

    pip freeze --exclude-editable | python scripts/pin.py > pins

Files are those of the indexes that pip is configured for: source archives, and wheels for Linux and Python 3.11 to
3.14.
"""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable

from packaging.utils import canonicalize_name, parse_wheel_filename

_PYTHONS = range(11, 15)
_LINK = re.compile(r'href="([^"#]*/)?([^"#/]+)#sha256=([0-9a-f]{64})"')


def fits(file: str) -> bool:
    """True for a file that a supported Python on Linux may install."""
    if not file.endswith(".whl"):
        return file.endswith((".tar.gz", ".zip"))
    *_, tags = parse_wheel_filename(file)
    return any(
        (tag.platform == "any" or re.fullmatch(r"(many|musl)?linux.*_(x86_64|aarch64)", tag.platform))
        and (tag.interpreter == "py3" or tag.interpreter in _interpreters(tag.abi))
        for tag in tags
    )


def _interpreters(abi: str) -> list[str]:
    if abi == "abi3":
        return [f"cp3{minor}" for minor in range(2, _PYTHONS.stop)]
    return [f"cp3{minor}" for minor in _PYTHONS if abi in (f"cp3{minor}", "none")]


def hashes(page: str, name: str, version: str) -> dict[str, str]:
    """Hashes by file name, of the files of a version that a page of an index names."""
    found = {}
    for _, file, digest in _LINK.findall(page):
        match = re.match(r"(.+?)-([^-]+?)(-.*\.whl|\.tar\.gz|\.zip)$", file)
        is_same = match is not None and canonicalize_name(match[1]) == name and match[2] == version
        if is_same and fits(file):
            found[file] = digest
    return found


def pin(name: str, version: str, digests: Iterable[str]) -> str:
    return " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{digest}" for digest in sorted(set(digests)))])


def _indexes() -> list[str]:
    """URLs of the configured indexes. The default one is known to pip only."""
    from pip._internal.models.index import PyPI

    text = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    given = {key: value.split() for key, value in re.findall(r"^[\w:]+\.((?:extra-)?index-url)='(.*)'$", text, re.M)}
    return [*given.get("index-url", [PyPI.simple_url]), *given.get("extra-index-url", [])]


def _page(index: str, name: str) -> str:
    """The page of a package, empty if the index lacks it."""
    tail = "/index.html" if index.startswith("file:") else "/"
    request = urllib.request.Request(f"{index.rstrip('/')}/{name}{tail}", headers={"Accept": "text/html"})
    try:
        with urllib.request.urlopen(request, timeout=60, context=ssl.create_default_context()) as answer:
            return str(answer.read().decode())
    except urllib.error.URLError:
        return ""


def main() -> None:
    indexes = _indexes()
    for line in sys.stdin:
        name, _, version = line.strip().partition("==")
        found: list[str] = []
        for index in indexes:
            found += hashes(_page(index, canonicalize_name(name)), canonicalize_name(name), version).values()
        if not found:
            sys.exit(f"error: no index has files of {name} {version} with hashes")
        print(pin(name, version, found))


if __name__ == "__main__":
    main()
