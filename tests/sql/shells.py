"""The databases' own command lines: psql, mariadb and sqlite3."""

from __future__ import annotations

import subprocess
from urllib.parse import urlsplit


def run_shell(url: str, script: str, *, fails: bool = False) -> str:
    """Run a script as a user would; returns its output: rows with tabs between their values, or else the error."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        command = ["sqlite3", "-bail", "-separator", "\t", parts.path[1:]]
    elif parts.scheme.startswith("postgres"):
        command = ["psql", "-X", "-q", "-At", "-F", "\t", "-v", "ON_ERROR_STOP=1", url]
    else:
        login = [f"--host={parts.hostname}", f"--port={parts.port}", f"--user={parts.username}"]
        login.append("--default-character-set=utf8mb4")
        command = ["mariadb", *login, f"--password={parts.password}", "--skip-column-names", "--batch", parts.path[1:]]
    done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode != 0) is fails, done.stderr
    return done.stderr if fails else done.stdout
