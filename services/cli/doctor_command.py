"""`stagemesh doctor [MODEL]`: from arguments to printed findings. Starts and changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from services.cli.arguments import Positional, parse_arguments
from services.cli.doctor_flags import DOCTOR_GROUPS
from services.cli.environment import take_environment
from services.cli.main import EXIT_FAILED
from services.cli.settings import doctor_request

MODEL = Positional("[MODEL]", "what serve would be given; without it the node alone is looked at")
_DESCRIPTION = (
    "Checks this node before or while stagemesh serve runs on it: call it with the flags of serve. "
    "With --master-addr it asks the head too. Downloads, starts and changes nothing. Exit code 1 "
    "if a check has failed, 2 for wrong usage."
)


def doctor(argv: Sequence[str]) -> int:
    """Prints what it finds; 0 where nothing has failed, else 1."""
    from services.doctor.examine import examine
    from services.doctor.report import render, to_json

    arguments = parse_arguments("doctor", _DESCRIPTION, DOCTOR_GROUPS, MODEL, argv)
    request = doctor_request(arguments, DOCTOR_GROUPS, take_environment())
    examination = examine(request)
    report = examination.report
    sys.stdout.write(to_json(report) if request.json else render(report))
    sys.stdout.flush()
    if request.listen:
        from services.doctor.listen import listen

        listen(request.config, examination, _say)
    return 0 if report.healthy else EXIT_FAILED


def _say(line: str) -> None:
    """Beside the report, which may be JSON."""
    print(line, file=sys.stderr, flush=True)
