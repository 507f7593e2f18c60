"""`millpond doctor`: what hurts the queue."""

import msgspec

from millpond.cli.app import Declined, Json, command, print_json
from millpond.cli.table import plain
from millpond.control import Control


@command("doctor", Control)
async def doctor(control: Control, json: Json = False) -> None:
    """Find what hurts the queue; exit code 1 if something must be done."""
    findings = await control.doctor()
    if json:
        print_json({"findings": msgspec.to_builtins(findings)})
    else:
        for finding in findings:
            print(f"{finding.severity}: {plain(finding.text)}")
            print(f"   {plain(finding.remedy)}")
        if not findings:
            print("nothing hurts")
    errors = sum(finding.severity == "error" for finding in findings)
    if errors:
        raise Declined(f"{errors} of {len(findings)} findings need action")
