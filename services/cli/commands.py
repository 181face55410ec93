"""`serve`, `gateway` and `stage-worker`: from arguments to the running service."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from services.cli.arguments import Positional, parse_arguments
from services.cli.environment import take_environment
from services.cli.flags import SERVE_GROUPS, STAGE_WORKER_GROUPS
from services.cli.main import load_service
from services.cli.settings import serve_config, stage_worker_config
from services.config import API_KEY_VARIABLE, ServeConfig

MODEL = Positional(
    "MODEL",
    "a local Hugging Face directory, smollm2-135m-instruct, or a Hub repository id",
)


def serve(argv: Sequence[str]) -> int:
    """Gateway and all stages on this machine, until a signal."""
    description = (
        "Serves MODEL from this machine: starts the stage workers and a gateway with an "
        "OpenAI-compatible REST API and gRPC."
    )
    config = _serve_config("serve", description, argv)
    if config.headless:
        return load_service("services.launch.headless", "run", "worker")(config)
    return load_service("gateway.app", "serve", "gateway,worker")(config)


def gateway(argv: Sequence[str]) -> int:
    """The gateway alone, until a signal."""
    description = (
        "Runs the gateway of MODEL and waits for its stage workers, which are started "
        "with stagemesh stage-worker."
    )
    config = _serve_config("gateway", description, argv)
    return load_service("gateway.app", "run", "gateway")(config)


def stage_worker(argv: Sequence[str]) -> int:
    """One stage worker, until the head or a signal ends it."""
    arguments = parse_arguments(
        "stage-worker",
        "Runs one stage of the model on this machine; joins the gateway at --master-addr.",
        STAGE_WORKER_GROUPS,
        None,
        argv,
    )
    config = stage_worker_config(arguments, STAGE_WORKER_GROUPS, take_environment())
    return load_service("stage_worker.service_main", "run", "worker")(config)


def _serve_config(command: str, description: str, argv: Sequence[str]) -> ServeConfig:
    arguments = parse_arguments(command, description, SERVE_GROUPS, MODEL, argv)
    if "api_key" in arguments.values:
        sys.stderr.write(
            "stagemesh: warning: --api-key on a command line is shown to every user of this "
            f"machine; use --api-key-file, or {API_KEY_VARIABLE} in the environment\n"
        )
    return serve_config(command, arguments, SERVE_GROUPS, take_environment())
