"""From arguments, file and environment to one config."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from services.cli import commands, main
from services.cli.arguments import Positional, parse_arguments
from services.cli.doctor_flags import DOCTOR_GROUPS
from services.cli.flags import SERVE_GROUPS, STAGE_WORKER_GROUPS, all_flags
from services.cli.settings import doctor_request, serve_config, stage_worker_config
from services.cli.usage import UsageError
from services.cli.vllm import vllm_serve_flags
from services.config import ServeConfig, StageWorkerConfig

MODEL = Positional("MODEL", "")
RAY = ("--distributed-executor-backend", "ray")


def parse(*argv: str, environment: dict[str, str] | None = None) -> ServeConfig:
    arguments = parse_arguments("serve", "", SERVE_GROUPS, MODEL, argv)
    return serve_config("serve", arguments, SERVE_GROUPS, environment or {})


def refusal(*argv: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        parse(*argv, environment=environment)
    return str(caught.value)


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "serve.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_model_alone_gives_the_defaults() -> None:
    assert parse("m") == ServeConfig(model="m")


def test_every_flag_fills_its_field() -> None:
    config = parse(
        "m",
        *("--tensor-parallel-size", "2", "--pipeline-parallel-size", "3"),
        *("--pp-layer-partition", "32,29", "--device", "cpu"),
        *("--master-addr", "10.0.0.1", "--master-port", "29600"),
        *("--host", "0.0.0.0", "--port", "9000", "--grpc-port", "9001"),
        *("--api-key", "one", "two", "--served-model-name", "a", "b"),
        *("--dtype", "bfloat16", "--max-model-len", "4k", "--tokenizer", "t"),
        *("--chat-template", "c.jinja", "--generation-config", "none"),
        *("--trust-remote-code", "--seed", "7", "--max-num-seqs", "8"),
        *("--max-num-batched-tokens", "1K", "--block-size", "32"),
        *("--kv-cache-memory-bytes", "1G", "--gpu-memory-utilization", "0.5"),
        "--enforce-eager",
    )
    assert config == ServeConfig(
        model="m",
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
        pp_layer_partition=(32, 29),
        host="0.0.0.0",
        port=9000,
        grpc_port=9001,
        master_addr="10.0.0.1",
        master_port=29600,
        dtype="bfloat16",
        max_model_len=4000,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        block_size=32,
        kv_cache_memory_bytes=2**30,
        gpu_memory_utilization=0.5,
        served_model_name=("a", "b"),
        tokenizer="t",
        chat_template="c.jinja",
        generation_config="none",
        seed=7,
        api_key=("one", "two"),
        device="cpu",
        enforce_eager=True,
        trust_remote_code=True,
    )


def test_flags_and_config_fields_are_the_same_set() -> None:
    serve = {flag.field for flag in all_flags(SERVE_GROUPS)} - {"config"}
    assert serve == {field.name for field in dataclasses.fields(ServeConfig)} - {
        "model",
        "pp_layer_partition_source",
    }
    worker = {flag.field for flag in all_flags(STAGE_WORKER_GROUPS)} - {"config"}
    assert worker == {field.name for field in dataclasses.fields(StageWorkerConfig)}


@pytest.mark.parametrize(
    "argv",
    [
        ("-tp", "2", "-pp", "3", "m"),
        ("m", "-tp=2", "-pp=3"),
        ("m", "--tensor_parallel_size", "2", "--pipeline_parallel_size=3"),
    ],
)
def test_short_names_and_underscores(argv: tuple[str, ...]) -> None:
    config = parse(*argv)
    assert (config.tensor_parallel_size, config.pipeline_parallel_size) == (2, 3)


def test_a_repeated_list_flag_adds_up() -> None:
    assert parse("m", "--api-key", "a", "--api-key", "b").api_key == ("a", "b")


def test_a_switch_can_be_turned_off_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "enforce-eager: true\n")
    assert parse("m", "--config", path).enforce_eager is True
    assert parse("m", "--config", path, "--no-enforce-eager").enforce_eager is False


def test_command_line_before_file_before_environment(tmp_path: Path) -> None:
    path = write(tmp_path, "pp_layer_partition: [20, 10]\nport: 9000\n")
    argv = ("m", "--config", path)
    partitions = [
        parse("m", environment={"VLLM_PP_LAYER_PARTITION": "15,15"}),
        parse(*argv),
        parse(*argv, "--pp-layer-partition", "16,14"),
    ]
    found = [(each.pp_layer_partition, each.pp_layer_partition_source) for each in partitions]
    assert found == [
        ((15, 15), "VLLM_PP_LAYER_PARTITION"),
        ((20, 10), f"pp_layer_partition in {path}"),
        ((16, 14), "--pp-layer-partition"),
    ]
    assert [each.port for each in partitions] == [8000, 9000, 9000]


def test_a_partition_and_a_variable_that_differ_are_both_named(tmp_path: Path) -> None:
    environment = {"VLLM_PP_LAYER_PARTITION": " 15, 15"}
    argv = ("m", "--pp-layer-partition")
    assert parse(*argv, "15,15", environment=environment).pp_layer_partition == (15, 15)
    assert refusal(*argv, "16,14", environment=environment) == (
        "--pp-layer-partition says '16,14' and VLLM_PP_LAYER_PARTITION says ' 15, 15'; set only "
        "one of them, or both alike"
    )
    path = write(tmp_path, "pp_layer_partition: [16, 14]\n")
    message = refusal("m", "--config", path, environment=environment)
    assert message.startswith(f"pp_layer_partition in {path} says [16, 14] and VLLM_PP")


def test_the_file_may_name_the_model(tmp_path: Path) -> None:
    path = write(tmp_path, "model: from-file\n")
    assert parse("--config", path).model == "from-file"
    assert parse("on-line", "--config", path).model == "on-line"


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert parse("m", "--config", write(tmp_path, "")) == ServeConfig(model="m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq: 4\n", "unknown key max-num-seq, did you mean max_num_seqs?"),
        ("enable-lora: true\n", "vLLM has enable-lora, stagemesh serve does not (yet)"),
        ("port: 70000\n", "port in {path} must be a port from 0"),
        ("- port\n", "must be a mapping"),
        ("port: [\n", "is not valid YAML"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "says max_num_seqs twice"),
        ("model: 3\n", "model in {path} must be a text"),
        ("block-size: true\n", "must be a whole number"),
        ("host: {a: b}\n", "host must be a text, a number"),
        ("served-model-name: [{a: b}]\n", "served-model-name must be"),
        ("pp-layer-partition: {16: a, 14: b}\n", "pp-layer-partition must be"),
        ("api-key: 2026-01-01\n", "api-key must be"),
        ("port: 1\nhost: a\nport: 2\n", "has the key port twice, again at line 3"),
        ("additional-config: {a: 1,\n  a: 2}\n", "has the key a twice, again at line 2"),
        ("host: &a [x]\nport: *a\n", "has the anchor or alias a at line 1; write"),
        ("host: " + "[" * 50_000, "is nested more than 20 levels deep at line 1"),
        ("host: [" + "x," * 20_000 + "]", "has more than 10000 values, at line 1"),
        ("host: 2026-99-99\n", "has a value that cannot be read: month must be in 1..12"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    assert message.format(path=path) in refusal("m", "--config", path)


def test_a_missing_file_is_refused() -> None:
    assert "cannot be read" in refusal("m", "--config", "/nonexistent/serve.yaml")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "MODEL is missing"),
        (("--api-key", "k", "m"), "MODEL is missing"),
        (("m", "--prot", "1"), "unknown flag --prot, did you mean --port?"),
        (("m", "--zzz"), "unknown flag --zzz; see stagemesh serve --help"),
        (("m", "--enable-lora"), "vLLM has --enable-lora, stagemesh serve does not (yet)"),
        (("m", "--enable_lora"), "vLLM has --enable_lora"),
        (("m", "--no-enable-expert-parallel"), "vLLM has --no-enable-expert-parallel"),
        (("m", "-dpl", "2"), "vLLM has -dpl"),
        (("m", "--speculative-config.method=x"), "vLLM has --speculative-config.method"),
        (("m", "--port"), "--port needs a value"),
        (("m", "--port", "--host"), "--port needs a value"),
        (("m", "n"), "unrecognized arguments: n"),
        (("m", "-pp", "0"), "--pipeline-parallel-size must be a whole number from 1"),
        (("m", "--pp-layer-partition", "-1,62"), "got '-1,62'"),
        (("m", "--seed", "-1"), "--seed must be a whole number from 0"),
        (("m", "--dtype", "int8"), "must be one of auto, float32, bfloat16, float16, got 'int8'"),
        (("m", "--port", "8001"), "--port and --grpc-port are both 8001"),
        (("",), "MODEL must not be empty"),
        (("m", *RAY, "--nnodes", "2"), "--nnodes 2 is for --distributed-executor-backend mp"),
        (("m", *RAY, "--node-rank", "1"), "--node-rank 1 is for"),
        (("m", *RAY, "--headless"), "--headless is for"),
        (("m", *RAY, "--wait-for-head"), "--wait-for-head is for --distributed-executor-backend"),
        (("m", "--wait-for-head"), "--wait-for-head is for --headless and stagemesh stage-worker"),
        (("m", "--distributed-executor-backend", "dask"), "must be one of mp, ray, got 'dask'"),
        (("m", *RAY, "--standby", "1"), "with --distributed-executor-backend ray: Ray's launcher"),
        (("m", "--standby", "1", "--max-recovery-attempts", "0"), "no spare ever takes over"),
        (("m", "--standby-stages", "0"), "names 1 stages, and --standby starts 0 spares"),
        (("m", "--standby", "1", "--standby-stages", "1"), "names stage 1, and there are stages 0"),
        (("m", "--standby-stages", "0,-1"), "must be one or more numbers of stages"),
        (
            (
                *("m", "--headless", "--nnodes", "2", "--node-rank", "1"),
                *("--standby", "1", "--standby-stages", "0"),
            ),
            "--standby-stages is for the head",
        ),
    ],
)
def test_wrong_usage_names_the_flag_and_the_remedy(argv: tuple[str, ...], message: str) -> None:
    assert message in refusal(*argv)


def test_the_environment_is_named_when_it_is_wrong() -> None:
    message = refusal("m", environment={"VLLM_PP_LAYER_PARTITION": "0,61"})
    assert message.startswith("VLLM_PP_LAYER_PARTITION must be")


def test_a_key_from_the_environment_is_used_and_never_shown(tmp_path: Path) -> None:
    config = parse("m", environment={"STAGEMESH_API_KEY": "secret"})
    assert config.api_key == ("secret",)
    assert "secret" not in repr(config)
    path = write(tmp_path, "api-key: [secret, '']\n")
    assert "secret" not in refusal("m", "--config", path)


def test_ray_does_not_get_the_key(tmp_path: Path) -> None:
    """It keeps the command line of whoever connects, and shows it to all of its users."""
    path = write(tmp_path, "distributed-executor-backend: ray\n")
    for argv in (("m", *RAY, "--api-key", "secret"), ("m", "--config", path, "--api-key=secret")):
        message = refusal(*argv)
        assert "STAGEMESH_API_KEY" in message and "--config" in message
        assert "secret" not in message
        arguments = parse_arguments("doctor", "", DOCTOR_GROUPS, Positional("[MODEL]", ""), argv)
        with pytest.raises(UsageError, match="Ray's list of jobs"):
            doctor_request(arguments, DOCTOR_GROUPS, {})
    path = write(tmp_path, "distributed-executor-backend: ray\napi-key: secret\n")
    assert parse("m", "--config", path).api_key == ("secret",)
    assert parse("m", *RAY, environment={"STAGEMESH_API_KEY": "secret"}).api_key == ("secret",)


def test_free_ports_do_not_clash() -> None:
    config = parse("m", "--port", "0", "--grpc-port", "0", "--master-port", "0")
    assert (config.port, config.grpc_port, config.master_port) == (0, 0, 0)


def test_the_control_port_matters_where_it_is_bound() -> None:
    argv = ("m", "--port", "29550")
    assert parse(*argv).port == 29550
    arguments = parse_arguments("gateway", "", SERVE_GROUPS, MODEL, argv)
    with pytest.raises(UsageError, match="--port and --master-port are both 29550"):
        serve_config("gateway", arguments, SERVE_GROUPS, {})


def test_a_port_to_dial_is_not_0() -> None:
    message = "0 lets the head choose"
    node = ("--nnodes", "2", "-pp", "2", "--node-rank", "1", "--headless")
    assert message in refusal("m", *node, "--master-port", "0")
    arguments = parse_arguments(
        "stage-worker", "", STAGE_WORKER_GROUPS, None, ["--master-port", "0"]
    )
    with pytest.raises(UsageError, match=message):
        stage_worker_config(arguments, STAGE_WORKER_GROUPS, {})


def test_stage_worker() -> None:
    argv = ("--master-addr", "10.0.0.1", "--pp-rank", "1", "--lifeline-fd", "7")
    arguments = parse_arguments("stage-worker", "", STAGE_WORKER_GROUPS, None, argv)
    config = stage_worker_config(arguments, STAGE_WORKER_GROUPS, {})
    assert config == StageWorkerConfig(master_addr="10.0.0.1", pp_rank=1, lifeline_fd=7)


def test_spares_and_what_they_hold(tmp_path: Path) -> None:
    config = parse("m", "-pp", "3", "--standby", "2", "--standby-stages", "2,0")
    assert (config.standby, config.standby_stages) == (2, (2, 0))
    in_file = write(tmp_path, "pipeline-parallel-size: 3\nstandby: 1\nstandby-stages: 2\n")
    assert parse("m", "--config", in_file).standby_stages == (2,)
    # With several nodes the spares may be elsewhere.
    several = ("-pp", "2", "--nnodes", "2", "--standby-stages", "0,1")
    assert parse("m", *several).standby == 0
    arguments = parse_arguments("stage-worker", "", STAGE_WORKER_GROUPS, None, ("--standby",))
    assert stage_worker_config(arguments, STAGE_WORKER_GROUPS, {}).standby
    argv = ("--standby", "--pp-rank", "1")
    arguments = parse_arguments("stage-worker", "", STAGE_WORKER_GROUPS, None, argv)
    with pytest.raises(UsageError, match="--pp-rank 1 asks for one"):
        stage_worker_config(arguments, STAGE_WORKER_GROUPS, {})
    arguments = parse_arguments("gateway", "", SERVE_GROUPS, MODEL, ("m", "--standby", "1"))
    with pytest.raises(UsageError, match="start them with stagemesh stage-worker --standby"):
        serve_config("gateway", arguments, SERVE_GROUPS, {})


def test_a_node_that_waits_for_its_head() -> None:
    node = ("--nnodes", "2", "-pp", "2", "--node-rank", "1", "--headless", "--wait-for-head")
    assert parse("m", *node).wait_for_head


def test_the_list_of_vllm_is_the_real_one() -> None:
    flags = vllm_serve_flags()
    assert len(flags) > 300
    assert {"--enable-lora", "--nnodes", "--api-server-count", "-dp", "-O", "--uds"} <= flags


TLS = ("--tls-dir", "tls", "--require-tls")
HTTPS = ("--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--require-tls",), "--require-tls needs --tls-dir"),
        (TLS, "--require-tls needs --ssl-certfile and --ssl-keyfile"),
        (HTTPS[:2], "--ssl-certfile needs --ssl-keyfile"),
        (HTTPS[2:], "--ssl-keyfile needs --ssl-certfile"),
        (("--allowed-origins", "chat.example"), "--allowed-origins must be origins like"),
        (("--allowed-origins", "[https://a"), "--allowed-origins must be origins like"),
    ],
)
def test_security_that_is_half_said_is_refused(argv: tuple[str, ...], message: str) -> None:
    assert message in refusal("m", *argv)


def test_security_that_is_whole() -> None:
    config = parse("m", *TLS, *HTTPS, "--api-key-file", "~/keys")
    assert config.tls_dir is not None and Path(config.tls_dir).is_absolute()
    assert config.api_key_file == str(Path.home() / "keys")
    node = ("--nnodes", "2", "--node-rank", "1", "--headless")
    assert parse("m", *node, *TLS).require_tls
    assert parse("m", environment={"STAGEMESH_TLS_DIR": "/t"}).tls_dir == "/t"
    arguments = parse_arguments("stage-worker", "", STAGE_WORKER_GROUPS, None, ("--require-tls",))
    with pytest.raises(UsageError, match="--require-tls needs --tls-dir"):
        stage_worker_config(arguments, STAGE_WORKER_GROUPS, {})


@pytest.mark.parametrize(
    "argv",
    [("https://a.example", "http://b:8080"), ('["https://a.example", "http://b:8080"]',)],
    ids=["words", "vLLM's JSON"],
)
def test_origins(argv: tuple[str, ...]) -> None:
    origins = parse("m", "--allowed-origins", *argv).allowed_origins
    assert origins == ("https://a.example", "http://b:8080")
    assert parse("m", "--allowed-origins", "*").allowed_origins == ("*",)


def test_a_key_on_the_command_line_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "load_service", lambda *_: lambda _: 0)
    assert main(["serve", "m", "--api-key", "secret"]) == 0
    warning = capfd.readouterr().err
    assert "shown to every user of this machine" in warning and "secret" not in warning
    monkeypatch.setenv("STAGEMESH_API_KEY", "secret")
    assert main(["serve", "m"]) == 0
    assert capfd.readouterr().err == ""
