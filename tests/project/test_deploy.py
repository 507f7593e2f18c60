"""The files of the deploy kit name commands, options, probes and metrics that exist."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml

from millpond.cli.app import app
from millpond.server.metrics import RequestMetrics, exposition
from millpond.server.routes import ROUTES

DEPLOY = Path(__file__).parents[2] / "deploy"
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def check_command(words: list[str]) -> None:
    command = COMMANDS[words[0]]
    options = {option for parameter in command.params for option in parameter.opts}
    for word in words[1:]:
        if word.startswith("--"):
            assert word in options, f"{words[0]} {word}"


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def test_every_file_is_listed() -> None:
    listed = set(re.findall(r"`([\w.-]+)`", (DEPLOY / "README.md").read_text())) - {"millpond"}
    assert listed == {file.name for file in DEPLOY.iterdir()} - {"README.md"}


def test_compose() -> None:
    (compose,) = documents("compose.yaml")
    for name in ("migrate", "server"):
        check_command(compose["services"][name]["command"])
        for other in compose["services"][name]["depends_on"]:
            assert other in compose["services"]
    assert all(port.startswith("127.0.0.1:") for port in compose["services"]["server"]["ports"])
    assert not re.search(r"PASSWORD: \w", (DEPLOY / "compose.yaml").read_text()), "no password in the file"


def test_dockerfile() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    words = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert words[0] == "FROM" and words.count("ENTRYPOINT") == 1
    assert "USER" in words and words.index("USER") < words.index("ENTRYPOINT"), "not as root"


@pytest.mark.parametrize("name", ["millpond-worker.service", "millpond-server.service"])
def test_units(name: str) -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.read_string((DEPLOY / name).read_text())
    command = shlex.split(unit["Service"]["ExecStart"])
    assert command[0].endswith("/millpond")
    check_command(command[1:])
    assert int(unit["Service"]["TimeoutStopSec"]) >= 30 and unit["Service"]["User"] != "root"


def test_kubernetes() -> None:
    paths = {route.path for route in ROUTES}
    for document in documents("kubernetes.yaml"):
        if document["kind"] != "Deployment":
            continue
        pod = document["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] >= 30
        (container,) = pod["containers"]
        check_command(container["args"])
        ports = {port["name"] for port in container["ports"]}
        for probe in ("readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["path"] in paths and container[probe]["httpGet"]["port"] in ports


def test_alerts_and_dashboard_use_metrics_of_the_server() -> None:
    streams: Any = SimpleNamespace(subscribers=[], sent={})
    text = exposition([], RequestMetrics(), streams, lambda queue: True).decode()
    known = set(re.findall(r"^# TYPE (\w+)", text, re.M))
    (alerts,) = documents("alerts.yaml")
    rules = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    used = " ".join([*rules, *(target["expr"] for panel in panels for target in panel["targets"])])
    names = {re.sub(r"_bucket$", "", name) for name in re.findall(r"millpond_\w+", used)}
    assert names <= known, names - known
    assert len(rules) == 4 and len(panels) == 6
