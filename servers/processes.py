"""A process and its descendants, as the kernel lists them."""

import contextlib
import os
import time
from pathlib import Path


def family(pid: int) -> list[int]:
    """The process and all below it. Process groups are not enough: PostgreSQL's children leave theirs."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (status := _status(int(folder.name))):
            children.setdefault(status[1], []).append(int(folder.name))
    found = [pid]
    for member in found:
        found.extend(children.get(member, []))
    return found


def wait_until_gone(pids: list[int], timeout: float = 30) -> None:
    give_up_at = time.monotonic() + timeout
    while alive := [pid for pid in pids if (status := _status(pid)) and status[0] != "Z"]:
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"processes do not end: {alive}")
        time.sleep(0.005)


def cpu_of(pid: int) -> float:
    """Seconds of processor time of the process and all below it, also of those that have ended."""
    ticks = 0
    for member in family(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # its own in user and system mode, then that of ended children
    return ticks / os.sysconf("SC_CLK_TCK")


def _status(pid: int) -> tuple[str, int] | None:
    """State letter and parent."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name, in parentheses, may itself contain spaces and parentheses.
    state, parent = text.rpartition(")")[2].split()[:2]
    return state, int(parent)
