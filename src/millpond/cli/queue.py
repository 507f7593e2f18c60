"""`millpond queue show` and `millpond queue set`: the settings that are stored with a queue."""

from typing import Annotated, Any

import msgspec
import typer

from millpond.cli import parse
from millpond.cli.app import Json, app, command, print_json
from millpond.cli.arguments import Create, Queue
from millpond.cli.table import plain
from millpond.clock import SECOND, seconds
from millpond.control import Control
from millpond.errors import InvalidOption
from millpond.retry import Retry
from millpond.seam.settings import QueueSettings

queue_app = typer.Typer(name="queue", help="Show and change the settings of a queue.", no_args_is_help=True)
app.add_typer(queue_app)

DEFAULT = "default"
"""The value that removes a setting."""


@command("show", Control, queue_app)
async def show(control: Control, queue: Queue, json: Json = False) -> None:
    """Print the settings of a queue."""
    await control.check_queue(queue)
    (settings,) = await control.operations.settings([queue])
    _print(settings, json)


@command("set", Control, queue_app, action="queue_set")
async def set_(
    control: Control,
    queue: Queue,
    lease: Annotated[str | None, typer.Option(help="Lease of claims, such as 30s.")] = None,
    max_crashes: Annotated[str | None, typer.Option(help="Crashes until FAILED; 0: no limit.")] = None,
    max_deliveries: Annotated[str | None, typer.Option(help="Deliveries until FAILED; 0: no limit.")] = None,
    retry_attempts: Annotated[str | None, typer.Option(help="Handler runs until FAILED; 0: no limit.")] = None,
    retry_initial: Annotated[str | None, typer.Option(help="Wait after the first error, such as 1s.")] = None,
    retry_multiplier: Annotated[str | None, typer.Option(help="Factor of each further wait.")] = None,
    retry_step: Annotated[str | None, typer.Option(help="Time added to each further wait.")] = None,
    retry_maximum: Annotated[str | None, typer.Option(help="Longest wait, such as 5m.")] = None,
    retry_jitter: Annotated[str | None, typer.Option(help="Random part of a wait, 0 to 1.")] = None,
    retry_total: Annotated[str | None, typer.Option(help="Time since the first run for others to start.")] = None,
    retry_first: Annotated[str | None, typer.Option(help="First wait: immediate or backoff.")] = None,
    retry: Annotated[str | None, typer.Option(help='"default" removes the whole retry policy.')] = None,
    create: Create = False,
    json: Json = False,
) -> None:
    """Change settings of a queue. The value "default" removes one.

    Workers follow within a second. Options that a subscriber gives itself replace the settings of its queues.
    `millpond pause`, `resume` and `retain` change the others.
    """
    if not create:
        await control.check_queue(queue)
    changes: dict[str, Any] = {}
    if lease is not None:
        changes["lease"] = None if lease == DEFAULT else parse.duration(lease, "--lease")
    for name, text in (("max_crashes", max_crashes), ("max_deliveries", max_deliveries)):
        if text is not None:
            changes[name] = None if text == DEFAULT else _number(int, text, name)
    policy = {
        "attempts": None if retry_attempts is None else _number(int, retry_attempts, "retry_attempts"),
        "initial": parse.duration(retry_initial, "--retry-initial"),
        "multiplier": None if retry_multiplier is None else _number(float, retry_multiplier, "retry_multiplier"),
        "step": parse.duration(retry_step, "--retry-step"),
        "maximum": parse.duration(retry_maximum, "--retry-maximum"),
        "jitter": None if retry_jitter is None else _number(float, retry_jitter, "retry_jitter"),
        "total": parse.duration(retry_total, "--retry-total"),
        "first": retry_first,
    }
    given = {name: value for name, value in policy.items() if value is not None}
    if retry is not None:
        if retry != DEFAULT or given:
            raise InvalidOption('--retry takes "default" only, without other options of the policy')
        changes["retry"] = None
    if given:
        (before,) = await control.operations.settings([queue])
        if given.get("attempts") == 0:
            given["attempts"] = None
        changes["retry"] = msgspec.structs.replace(before.retry or Retry(), **given)
    if not changes:
        raise InvalidOption(
            "no setting was given: give --lease, --retry-attempts or another option of --retry, --max-crashes or "
            "--max-deliveries"
        )
    await control.operations.configure(queue, **changes)
    (settings,) = await control.operations.settings([queue])
    _print(settings, json)


def _number(kind: type, text: str, name: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise InvalidOption(f"--{name.replace('_', '-')} {text!r} is not a number") from None


def _print(settings: QueueSettings, json: bool) -> None:
    facts = _facts(settings)
    if json:
        print_json(facts)
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{part} {part_value}" for part, part_value in value.items() if part_value is not None)
        print(f"{name}: {plain(str(DEFAULT if value is None else value))}")


def _facts(settings: QueueSettings) -> dict[str, Any]:
    retry = None
    if settings.retry is not None:
        retry = {name: value for name, value in msgspec.structs.asdict(settings.retry).items() if name != "never"}
        for name in ("initial", "step", "maximum", "total"):
            retry[name] = None if retry[name] is None else seconds(retry[name])
        retry["attempts"] = retry["attempts"] or 0
    keep = {"keep_completed": settings.keep_completed_us, "keep_failed": settings.keep_failed_us}
    return {
        "queue": settings.queue,
        "paused": settings.paused,
        "lease": settings.lease,
        "retry": retry,
        "max_crashes": settings.max_crashes,
        "max_deliveries": settings.max_deliveries,
        **{name: None if value is None else value / SECOND for name, value in keep.items()},
    }
