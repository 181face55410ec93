"""Merges command line, YAML file and environment into one config.

Command line before file before environment before the dataclass's default.
Every value is checked by its flag's parser, whichever way it came, and an
error names the flag or key, what was written, and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.bench.settings import BenchSettings
from services.cli.arguments import Arguments, Positional
from services.cli.contradictions import contradictions, no_port_to_ask, no_tls
from services.cli.doctor_flags import OWN_FLAGS
from services.cli.flag import Flag, FlagGroup
from services.cli.flags import CONFIG_FLAG, all_flags
from services.cli.plan_flags import PlanRequest
from services.cli.usage import UsageError, did_you_mean
from services.cli.values import Raw
from services.cli.vllm import is_vllm_flag
from services.config import API_KEY_VARIABLE, ServeConfig, StageWorkerConfig
from services.doctor.request import DoctorRequest
from services.errors import ConfigError
from services.text import MAX_SHOWN_CHARACTERS, shown
from services.topology.compatibility import check_compatibility, request_of
from services.topology.plan_result import PlanSettings

MAX_CONFIG_FILE_BYTES = 1 << 20


def serve_config(
    command: str,
    arguments: Arguments,
    groups: Sequence[FlagGroup],
    environment: Mapping[str, str],
) -> ServeConfig:
    """The config of `serve` and `gateway`. Raises `UsageError`, also for what cannot be combined
    whatever the model: that is known before one is looked for."""
    fields, model = _merge(command, arguments, groups, environment, Positional("MODEL", ""))
    _check_keys(arguments, fields)
    config = ServeConfig(model=_required(command, model), **fields)
    for contradiction in contradictions(command, config):
        raise contradiction
    try:
        check_compatibility(request_of(config))
    except ConfigError as error:
        raise UsageError(error.message, param=error.param) from None
    return config


def doctor_request(
    arguments: Arguments, groups: Sequence[FlagGroup], environment: Mapping[str, str]
) -> DoctorRequest:
    """What `doctor` is asked: the config of `serve`, and everything that `serve` would refuse
    about it. Raises `UsageError` for an unknown flag, a file that cannot be read and a key that
    asking Ray would tell it, only."""
    refused: list[UsageError] = []
    fields, model = _merge(
        "doctor", arguments, groups, environment, Positional("MODEL", ""), refused
    )
    _check_keys(arguments, fields)
    own_names = [flag.field for flag in OWN_FLAGS]
    own = {name: fields.pop(name) for name in own_names if name in fields}
    config = ServeConfig(model=model or "", **fields)
    listens = bool(own.get("listen", False))
    if listens and (config.headless or config.node_rank > 0):
        raise UsageError(
            "--listen is for the head's node, which the others ask; leave out --headless and "
            "--node-rank, or leave out --listen"
        )
    if own.get("deep") and not model:
        raise UsageError("--deep reads the weights of MODEL; name it right after stagemesh doctor")
    names_head = bool(fields.keys() & {"master_addr", "master_port"})
    problems = [*refused, *contradictions("serve", config)]
    if config.master_port == 0 and not model and not listens and not config.headless:
        problems.append(no_port_to_ask())
    # A head that would choose its port can only be one that is not there yet.
    asks_head = config.master_port != 0 and (config.node_rank > 0 or (names_head and not listens))
    return DoctorRequest(config, tuple(problems), asks_head, **own)


def plan_request(
    arguments: Arguments, groups: Sequence[FlagGroup], environment: Mapping[str, str]
) -> PlanRequest:
    """What `plan` is asked. Raises `UsageError`."""
    fields, model = _merge("plan", arguments, groups, environment, Positional("MODEL", ""))
    as_json = bool(fields.pop("json", False))
    return PlanRequest(_required("plan", model), as_json, PlanSettings(**fields))


def bench_settings(
    arguments: Arguments, groups: Sequence[FlagGroup], environment: Mapping[str, str]
) -> BenchSettings:
    """What `bench serve` is asked. Raises `UsageError`."""
    fields, _ = _merge("bench serve", arguments, groups, environment, None)
    settings = BenchSettings(**fields)
    if settings.dataset_name == "sharegpt" and settings.dataset_path is None:
        raise UsageError(
            "--dataset-name sharegpt needs --dataset-path FILE; without a file, "
            "--dataset-name sharegpt-like draws lengths like those"
        )
    return settings


def stage_worker_config(
    arguments: Arguments, groups: Sequence[FlagGroup], environment: Mapping[str, str]
) -> StageWorkerConfig:
    """The config of `stage-worker`. Raises `UsageError`."""
    fields, _ = _merge("stage-worker", arguments, groups, environment, None)
    config = StageWorkerConfig(**fields)
    if config.master_port == 0:
        raise no_port_to_ask()
    if config.standby and config.pp_rank is not None:
        raise UsageError(
            f"--standby wants no place before one is lost, and --pp-rank {config.pp_rank} asks for "
            "one; leave one of them out",
            param="--pp-rank",
        )
    if config.require_tls and config.tls_dir is None:
        raise no_tls()
    return config


def _check_keys(arguments: Arguments, fields: Mapping[str, Any]) -> None:
    """Ray keeps the command line of whoever connects to it, for all users of the cluster.
    Raises `UsageError`."""
    if fields.get("distributed_executor_backend") == "ray" and "api_key" in arguments.values:
        raise UsageError(
            "--api-key on the command line would be shown in Ray's list of jobs; put the key into "
            f"the environment ({API_KEY_VARIABLE}) or into the file of --config (api-key)",
            param="--api-key",
        )


def _required(command: str, model: str | None) -> str:
    if model is None:
        raise UsageError(
            f"MODEL is missing: name a model directory, a Hub repository or "
            f"smollm2-135m-instruct right after `stagemesh {command}` "
            f"(after a flag that takes several values it would count as one of them)"
        )
    return model


def _merge(
    command: str,
    arguments: Arguments,
    groups: Sequence[FlagGroup],
    environment: Mapping[str, str],
    positional: Positional | None,
    refused: list[UsageError] | None = None,
) -> tuple[dict[str, Any], str | None]:
    """Checked values by field name, and the positional.

    Raises `UsageError` for a value that its flag does not take; where `refused` is given
    it goes there instead, and the field keeps its default.
    """
    flags = [flag for flag in all_flags(groups) if flag is not CONFIG_FLAG]
    from_file: dict[str, Raw] = {}
    if arguments.config_file is not None:
        extra = ("model",) if positional is not None else ()
        from_file = read_config_file(command, arguments.config_file, flags, extra)
    fields: dict[str, Any] = {}
    for flag in flags:
        if flag.field in arguments.values:
            source, raw = flag.names[0], arguments.values[flag.field]
        elif flag.field in from_file:
            source, raw = f"{flag.field} in {arguments.config_file}", from_file[flag.field]
        elif flag.environment is not None and environment.get(flag.environment):
            source, raw = flag.environment, environment[flag.environment]
        else:
            continue
        try:
            fields[flag.field] = _checked(flag, source, raw)
            if flag.source_field is not None:
                fields[flag.source_field] = source
            if flag.environment_agrees:
                _check_agreement(flag, source, raw, environment)
        except UsageError as error:
            if refused is None:
                raise
            refused.append(error)
    named = from_file.get("model")
    if named is not None and not isinstance(named, str):
        raise UsageError(f"model in {arguments.config_file} must be a text, got {_shown(named)}")
    model = arguments.positional if arguments.positional is not None else named
    if model is not None and not model.strip():
        raise UsageError("MODEL must not be empty")
    return fields, model


def _check_agreement(flag: Flag, source: str, raw: Raw, environment: Mapping[str, str]) -> None:
    """Raises `UsageError` where the flag's variable is set to something else than is used."""
    name = flag.environment
    there = environment.get(name) if name else None
    if not name or not there or source == name:
        return
    if _checked(flag, source, raw) != _checked(flag, name, there):
        raise UsageError(
            f"{source} says {_shown(raw)} and {name} says {_shown(there)}; set only one of them, "
            "or both alike",
            param=flag.names[0],
        )


def _shown(raw: object) -> str:
    """A value as it was written, for one line."""
    if isinstance(raw, str):
        return repr(raw) if len(raw) <= MAX_SHOWN_CHARACTERS else f"'{shown(raw)}'"
    return shown(repr(raw))


def _checked(flag: Flag, source: str, raw: Raw) -> object:
    try:
        return flag.parse(raw)
    except ValueError as error:
        got = "a key that is not shown" if flag.field == "api_key" else _shown(raw)
        raise UsageError(f"{source} {error}, got {got}", param=flag.names[0]) from None


def read_config_file(
    command: str, path: str, flags: Sequence[Flag], extra: Sequence[str] = ()
) -> dict[str, Raw]:
    """Raw values by field name; keys may have dashes or underscores.

    Raises `UsageError` for a file that cannot be read, is not a mapping, or has a
    key that the command does not know.
    """
    from services.cli.yaml_file import load_yaml  # Only here: a start without a file is faster.

    try:
        if Path(path).stat().st_size > MAX_CONFIG_FILE_BYTES:
            raise UsageError(f"--config {path} is larger than {MAX_CONFIG_FILE_BYTES} bytes")
        content = load_yaml(Path(path).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {path} is not UTF-8 text") from None
    except ValueError as error:
        raise UsageError(f"--config {path} {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path} must be a mapping of flag names to values")
    known = {flag.field for flag in flags} | set(extra)
    objects = {flag.field for flag in flags if flag.is_object}
    result: dict[str, Raw] = {}
    for key, value in content.items():
        field = str(key).replace("-", "_")
        if field not in known:
            raise UsageError(_unknown_key_message(command, path, shown(str(key)), known))
        if field in result:
            raise UsageError(f"--config {path} says {field} twice (with dash and underscore)")
        if value is not None:
            is_object = field in objects and isinstance(value, dict)
            result[field] = value if is_object else _plain(path, str(key), value)
    return result


def _plain(path: str, key: str, value: object) -> Raw:
    """A scalar or a list of scalars, as a flag could say it."""
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return value
    raise UsageError(f"--config {path}: {key} must be a text, a number, true, false, or a list")


def _unknown_key_message(command: str, path: str, key: str, known: set[str]) -> str:
    if is_vllm_flag(f"--{key.replace('_', '-')}"):
        return f"--config {path}: vLLM has {key}, stagemesh {command} does not (yet); leave it out"
    suggestion = did_you_mean(key.replace("-", "_"), known)
    tail = suggestion or f"; see stagemesh {command} --help"
    return f"--config {path}: unknown key {key}{tail}"
