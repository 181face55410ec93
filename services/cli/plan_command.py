"""`stagemesh plan MODEL`: from arguments to a printed plan. Starts nothing, needs no device."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from services.cli.arguments import Positional, parse_arguments
from services.cli.main import EXIT_FAILED
from services.cli.plan_flags import PLAN_GROUPS
from services.cli.plan_text import render
from services.cli.settings import plan_request
from services.models.config_file import find_config
from services.topology.plan import make_plan
from services.topology.planfacts import read_planned_model
from services.topology.weightcheck import check_weight_bytes

MODEL = Positional(
    "MODEL",
    "a model directory, a config.json, smollm2-135m-instruct, or a Hub repository id in the cache",
)
_DESCRIPTION = (
    "Predicts what each stage of a layout needs and whether it fits, from config.json alone: "
    "no weights, devices or network. Exit code 1 if the layout does not fit."
)


def plan(argv: Sequence[str]) -> int:
    """Prints the plan; 0 where the layout fits or nothing is known against it, else 1."""
    arguments = parse_arguments("plan", _DESCRIPTION, PLAN_GROUPS, MODEL, argv)
    request = plan_request(arguments, PLAN_GROUPS, os.environ)
    config_file = find_config(request.model)
    model = read_planned_model(config_file)
    made = make_plan(model, request.settings)
    weights = check_weight_bytes(config_file.parent, model.facts)
    if request.json:
        document = {
            "schema_version": made.schema_version,
            "name": request.model,
            "config_file": str(config_file),
            "weights": asdict(weights),
            **asdict(made),
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write(render(request.model, made, weights))
    return EXIT_FAILED if made.fits is False else 0
