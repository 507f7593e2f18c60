"""Compare dependencies with known vulnerabilities. It needs no network: scripts/advisories.json has the data.

python scripts/audit.py                  # lower bounds, pinned versions, and the packages of this environment
python scripts/audit.py --import FOLDER  # renew the data from OSV records (JSON files of an advisory database)
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).with_name("advisories.json")
TOOLS = ("pip", "setuptools")
"""Packages of every virtual environment that no requirement names."""


class Advisory(NamedTuple):
    package: str
    id: str
    introduced: str
    fixed: str | None

    def affects(self, version: str) -> bool:
        here = Version(version)
        return Version(self.introduced) <= here and (self.fixed is None or here < Version(self.fixed))


def advisories(path: Path = DATA) -> list[Advisory]:
    return [Advisory(*(row.get(field) for field in Advisory._fields)) for row in json.loads(path.read_text())["known"]]


def findings(versions: Mapping[str, str], known: Iterable[Advisory], where: str) -> list[str]:
    """A line for each package with a known vulnerability."""
    return [
        f"{where}: {package} {version} has {one.id}, " + (f"fixed in {one.fixed}" if one.fixed else "without a fix")
        for package, version in versions.items()
        for one in known
        if one.package == canonicalize_name(package) and one.affects(version)
    ]


def pinned(text: str) -> dict[str, str]:
    """Versions in constraints.txt."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.M))


def lower_bounds(project: Mapping[str, object]) -> dict[str, str]:
    """The lowest allowed version of each requirement of pyproject.toml, `0` if there is no bound."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    dependencies = project["dependencies"]
    assert isinstance(dependencies, list)
    found = {}
    for line in [*dependencies, *(line for lines in extras.values() for line in lines)]:
        requirement = Requirement(line)
        if requirement.name != project["name"]:
            lowest = [one.version for one in requirement.specifier if one.operator in (">=", "==", "~=")]
            found[requirement.name] = lowest[0].removesuffix(".*") if lowest else "0"
    return found


def installed() -> dict[str, str]:
    return {one.metadata["Name"]: one.version for one in metadata.distributions()}


def from_osv(folder: Path, packages: Iterable[str]) -> Iterator[Advisory]:
    """The advisories of OSV records for these packages of the Python registry."""
    wanted = {canonicalize_name(package) for package in packages}
    for file in sorted(folder.rglob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        if record.get("withdrawn"):
            continue
        for affected in record.get("affected", ()):
            package = affected.get("package", {})
            name = canonicalize_name(package.get("name", ""))
            if package.get("ecosystem") != "PyPI" or name not in wanted:
                continue
            for range_ in affected.get("ranges", ()):
                if range_.get("type") == "ECOSYSTEM":
                    yield from _of_range(name, _name_of(record), range_["events"])


def _name_of(record: Mapping[str, object]) -> str:
    """The CVE number, because databases give one vulnerability several names."""
    names = [str(record["id"]), *map(str, record.get("aliases", ()))]  # type: ignore[call-overload]
    return next((name for name in names if name.startswith("CVE-")), names[0])


def _of_range(package: str, id_: str, events: Iterable[Mapping[str, str]]) -> Iterator[Advisory]:
    introduced = None
    for event in events:
        if "introduced" in event:
            introduced = event["introduced"]
        elif "fixed" in event and introduced is not None:
            yield Advisory(package, id_, introduced, event["fixed"])
            introduced = None
    if introduced is not None:
        yield Advisory(package, id_, introduced, None)


def write(known: Iterable[Advisory], path: Path = DATA) -> int:
    rows = sorted({one for one in known if _is_readable(one)}, key=lambda one: (one.package, one.id, one.introduced))
    lines = ",\n".join("    " + json.dumps(one._asdict()) for one in rows)
    path.write_text(f'{{\n  "collected": "{datetime.now(UTC):%Y-%m-%d}",\n  "known": [\n{lines}\n  ]\n}}\n')
    return len(rows)


def _is_readable(one: Advisory) -> bool:
    try:
        Version(one.introduced), Version(one.fixed or "0")
    except InvalidVersion:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--import", dest="folder", type=Path, metavar="FOLDER", help="folder with OSV records")
    folder = parser.parse_args().folder
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = pinned((ROOT / "constraints.txt").read_text())
    if folder is not None:
        print(f"{write(from_osv(folder, [*pins, *lower_bounds(project), *TOOLS]))} advisories")
        return 0
    known = advisories()
    found = [
        *findings(lower_bounds(project), known, "pyproject.toml allows"),
        *findings(pins, known, "constraints.txt"),
        *findings(installed(), known, "installed"),
    ]
    print(*found, sep="\n", end="\n" if found else "")
    collected = json.loads(DATA.read_text())["collected"]
    print(f"{len(found)} known vulnerabilities ({len(known)} advisories, collected {collected})")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
