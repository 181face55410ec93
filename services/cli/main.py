"""Finds the command, builds its config, and calls the service that does the work."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.cli.usage import UsageError, did_you_mean
from services.errors import StagemeshError
from services.text import visible

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

OWN_PACKAGES = ("services", "gateway", "stage_worker", "stagemesh")


@dataclass(frozen=True, slots=True)
class Command:
    """One command: what it is for, and what runs it."""

    name: str
    summary: str
    run: Callable[[Sequence[str]], int]


def _serve(argv: Sequence[str]) -> int:
    from services.cli.commands import serve

    return serve(argv)


def _gateway(argv: Sequence[str]) -> int:
    from services.cli.commands import gateway

    return gateway(argv)


def _stage_worker(argv: Sequence[str]) -> int:
    from services.cli.commands import stage_worker

    return stage_worker(argv)


def _plan(argv: Sequence[str]) -> int:
    from services.cli.plan_command import plan

    return plan(argv)


def _doctor(argv: Sequence[str]) -> int:
    from services.cli.doctor_command import doctor

    return doctor(argv)


def _bench(argv: Sequence[str]) -> int:
    from services.cli.bench_command import bench

    return bench(argv)


def _keys(argv: Sequence[str]) -> int:
    from services.cli.keys_command import keys

    return keys(argv)


def _model(argv: Sequence[str]) -> int:
    from services.cli.model_command import model

    return model(argv)


def _certs(argv: Sequence[str]) -> int:
    from services.cli.certs_command import certs

    return certs(argv)


def _version(argv: Sequence[str]) -> int:
    from services.cli.version_command import version

    return version(argv)


COMMANDS = (
    Command("serve", "serve a model from this machine: gateway, stages and all", _serve),
    Command("gateway", "the gateway alone; stage workers on other machines join it", _gateway),
    Command("stage-worker", "one stage on this machine; joins a gateway", _stage_worker),
    Command("plan", "what a layout needs and whether it fits; starts nothing", _plan),
    Command("doctor", "what is wrong with this node or mesh, and what to do", _doctor),
    Command("bench", "measure an OpenAI endpoint, of any server", _bench),
    Command("keys", "API keys for clients, stored hashed", _keys),
    Command("model", "fetch the demo model", _model),
    Command("certs", "a private CA for TLS between the parts", _certs),
    Command("version", "versions of Stagemesh and what it runs on", _version),
)


def usage() -> str:
    """The help without a command."""
    width = max(len(command.name) for command in COMMANDS) + 2
    lines = [f"  {command.name:<{width}}{command.summary}" for command in COMMANDS]
    return "\n".join(
        [
            "usage: stagemesh COMMAND [...]",
            "",
            "Serves one large language model from many devices by pipeline parallelism.",
            "",
            "commands:",
            *lines,
            "",
            "stagemesh COMMAND --help tells what a command takes.",
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Processes are started by exec only; without this gRPC warns about each of them.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    # Our own lines say what went wrong; gRPC's C++ side would say it again, in its words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        return _dispatch(arguments)
    except UsageError as error:
        return _fail(str(error), EXIT_USAGE)
    except StagemeshError as error:
        return _fail(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away; nothing more can be said on it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        raise UsageError(f"a command is missing; one of: {_names()}")
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0
    if name in ("-V", "--version"):
        name = "version"
    for command in COMMANDS:
        if command.name == name:
            try:
                return command.run(rest)
            except SystemExit as stop:  # argparse, after --help
                return stop.code if isinstance(stop.code, int) else EXIT_FAILED
    suggestion = did_you_mean(name, [command.name for command in COMMANDS])
    raise UsageError(f"unknown command {name}{suggestion or f'; one of: {_names()}'}")


def _names() -> str:
    return ", ".join(command.name for command in COMMANDS)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"stagemesh: error: {visible(' '.join(message.split()))}\n")
    return code


def load_service(module: str, function: str, extra: str) -> Callable[..., int]:
    """The function that runs a service, imported now.

    Raises `StagemeshError` with the extra to install where a dependency is missing.
    """
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).split(".", 1)[0]
        if missing in OWN_PACKAGES:
            raise
        raise StagemeshError(
            f"the package {missing} is not installed; pip install 'stagemesh[{extra}]'"
        ) from error
    entry: Callable[..., int] = getattr(loaded, function)
    return entry
