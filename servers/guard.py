"""Ends a server whose owner was killed and could not end it."""

import subprocess
from pathlib import Path

# Reads the server's process id, or an empty line while it is down. The pipe closes when the owner is gone. SIGQUIT
# makes PostgreSQL end its children too; RabbitMQ's port mapper stays in the process group of its server.
_SCRIPT = """
server=
while read -r line; do server=$line; done
[ "$server" = dismissed ] && exit
if [ -n "$server" ]; then
    kill -QUIT "$server" && sleep 2 && kill -KILL "$server"
    kill -s KILL -- "-$server"
fi
rm -rf "$1"
"""


class Guard:
    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "guard", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's interrupt is for the owner
        )

    def watch(self, pid: int | None) -> None:
        self._tell(str(pid or ""))

    def dismiss(self) -> None:
        self._tell("dismissed")
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        if self._process.stdin:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
