"""Whole programs that are measured from outside: Millpond's worker and its peers, each in a separate process."""

import asyncio
import json
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "bench" / "peers"
PEERS_VENV = ROOT / "build" / "peers"
MILLPOND = "millpond"


def peers_python() -> Path:
    """The Python of the peers' virtual environment; create it if it is missing or its pins have changed."""
    python, installed = PEERS_VENV / "bin" / "python", PEERS_VENV / "installed"
    pins = PEERS / "requirements.txt"
    if not installed.exists() or installed.read_text() != pins.read_text():
        PEERS_VENV.parent.mkdir(exist_ok=True)
        subprocess.run([ROOT / "scripts" / "make-venv", PEERS_VENV], check=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", "--requirement", pins], check=True)
        installed.write_text(pins.read_text())
    return python


async def contest(name: str, mode: str, count: int, url: str) -> dict[str, Any]:
    """Let one of `bench/peers` handle `count` messages in an empty database."""
    python = sys.executable if name == MILLPOND else peers_python()
    process = await _start(python, PEERS / f"run_{name}.py", mode, count)
    answer = await _answer(process, f"{url}\n")
    if answer["count"] != count:
        raise RuntimeError(f"{name} handled {answer['count']} of {count} messages")
    return answer


async def work(kind: str, count: int, batch: int, url: str, processes: int = 1) -> list[dict[str, Any]]:
    """Let processes of `bench.work` handle the `count` messages of a database; all start at the same time."""
    command = (sys.executable, "-m", "bench.work", kind, count // processes, batch)
    started = [await _start(*command) for _ in range(processes)]
    for process in started:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{url}\n".encode())
        await process.stdin.drain()
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"a process of {kind} did not start")
    answers = await asyncio.gather(*(_answer(process, "go\n") for process in started))
    handled = sum(answer["count"] for answer in answers)
    if handled != count:
        raise RuntimeError(f"{kind} handled {handled} of {count} messages")
    return answers


async def _start(*command: Any) -> Process:
    return await asyncio.create_subprocess_exec(*map(str, command), stdin=PIPE, stdout=PIPE, cwd=ROOT)


async def _answer(process: Process, line: str) -> dict[str, Any]:
    output, _ = await process.communicate(line.encode())
    if process.returncode:
        raise RuntimeError(f"a contestant ended with {process.returncode}")
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer
