"""Print the packages that `pip install "millpond[all]"` brings, as a CycloneDX document (JSON).

    python scripts/sbom.py > dist/sbom.json

Versions are those of this environment, which has the pins of constraints.txt. Two runs give the same document.
"""

from __future__ import annotations

import json
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
NOT_SHIPPED = {"dev", "all"}
"""Extras for developers, and the one that repeats the others."""


def requirements() -> list[str]:
    extras = PROJECT["optional-dependencies"]
    return [*PROJECT["dependencies"], *(line for name in extras if name not in NOT_SHIPPED for line in extras[name])]


def closure() -> dict[str, set[str]]:
    """Each package that Millpond requires, directly or not, with the packages that it requires itself."""
    found: dict[str, set[str]] = {PROJECT["name"]: set()}
    seen: set[str] = set()
    waiting = [(PROJECT["name"], line, "") for line in requirements()]
    while waiting:
        parent, line, extra = waiting.pop()
        requirement = Requirement(line)
        if not _applies(requirement, extra):
            continue
        name = canonicalize_name(requirement.name)
        found[parent].add(name)
        found.setdefault(name, set())
        for wanted in ("", *requirement.extras):
            if (key := f"{name}[{wanted}]") not in seen:
                seen.add(key)
                waiting += [(name, line, wanted) for line in metadata.distribution(name).requires or ()]
    return {package: needs - {package} for package, needs in sorted(found.items())}


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def document() -> dict[str, Any]:
    packages = closure()
    own = {"name": PROJECT["name"], "version": PROJECT["version"], "licenses": _licenses(PROJECT["license"])}
    content = {
        "metadata": {"component": {"type": "library", "bom-ref": _purl(PROJECT["name"]), **own}},
        "components": [_component(package) for package in packages if package != PROJECT["name"]],
        "dependencies": [
            {"ref": _purl(package), "dependsOn": sorted(map(_purl, needs))} for package, needs in packages.items()
        ],
    }
    number = uuid5(NAMESPACE_URL, json.dumps(content, sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
        **content,
    }


def _component(package: str) -> dict[str, Any]:
    about = metadata.distribution(package).metadata
    licence = about.get("License-Expression") or _classified(about.get_all("Classifier") or []) or about.get("License")
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": _purl(package),
        "name": about["Name"],
        "version": about["Version"],
        "purl": _purl(package),
    }
    if licence and len(licence) < 200:  # some packages put the whole text there
        component["licenses"] = _licenses(licence)
    return component


def _licenses(name: str) -> list[dict[str, Any]]:
    return [{"license": {"name": name}}]


def _classified(classifiers: list[str]) -> str:
    return ", ".join(line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License ::"))


def _purl(package: str) -> str:
    version = PROJECT["version"] if package == PROJECT["name"] else metadata.version(package)
    return f"pkg:pypi/{package}@{version}"


if __name__ == "__main__":
    json.dump(document(), sys.stdout, indent=2)
    print()
