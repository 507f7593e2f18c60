"""The documentation site builds without a warning and without network, and loads nothing from other hosts."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOBODY = "http://127.0.0.1:9"
"""An address where nothing answers."""


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "http_proxy": NOBODY, "https_proxy": NOBODY},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for file in (tmp_path / "site").rglob("*.html"):
        assert not re.findall(r'(?:src|href)="?(?:https?:)?//[^" >]+\.(?:js|css|woff2?)', file.read_text()), file
    page = (tmp_path / "site" / "index.html").read_text()
    assert 'href="security.html"' in page
    there = [page.index(f'href="{name}.html"') for name in ("tutorial", "how-to/transactions", "reference/api")]
    assert there == sorted(there) and page.index('href="decisions/index.html"') > there[-1]
    assert 'href="reference/cli.html"' in (tmp_path / "site" / "security.html").read_text()
    example = (tmp_path / "site" / "examples" / "fastapi_shop.html").read_text()
    assert "SessionPublisher" in example and 'href="examples/fastapi_shop.html"' in page
    assert not list(dead_links(tmp_path / "site"))
    interface = (tmp_path / "site" / "reference" / "api.html").read_text()
    for name in ("Millpond.middleware", "Subscriber.publish_sync", "Subscriber.publish_many_sync", "SnoozeMessage"):
        assert f'id="millpond.{name}"' in interface
    for name in ("testing_sync", "assert_published"):
        assert name in interface


def dead_links(site: Path) -> Iterator[tuple[Path, str]]:
    """Links in the text of pages that lead to no file of the site."""
    for file in site.rglob("*.html"):
        article = file.read_text().partition("<article")[2].partition("</article")[0]
        for link in re.findall(r'href="([^"#]+)', article):
            if not link.startswith(("http:", "https:", "mailto:")) and not (file.parent / link).exists():
                yield file, link


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert listed - {"security.md"} == {page for page in pages if not page.startswith("decisions/0")}
