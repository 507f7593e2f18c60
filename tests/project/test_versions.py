"""`scripts/check-versions`: with --all no version of Python that the classifiers name is left out."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_version_that_is_not_found_is_an_error(tmp_path: Path) -> None:
    for name in ("python3.11", "python3.12", "python3.13", "python3.14"):
        python = tmp_path / name
        python.write_text("#!/bin/sh\nexit 1\n")
        python.chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "check-versions", "--all"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr == "Python 3.11 is not found, and pyproject.toml names it\n"
