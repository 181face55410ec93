"""The flags of each command, as data.

argparse, the YAML file and the error messages all work from these tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.cli import json_values, values
from services.cli.flag import Arity, Flag, FlagGroup
from services.cli.recovery_flags import RECOVERY_FLAGS, WAIT_FOR_HEAD_FLAG, WORKER_STANDBY_FLAG
from services.cli.security_flags import DOOR_FLAGS, TLS_FLAGS
from services.config import DEFAULT_MASTER_PORT
from services.topology.compatibility import INTERCONNECTS
from services.topology.partition import PARTITION_ENV

CONFIG_FLAG = Flag(
    ("--config",),
    values.text,
    "YAML file with the names of these flags; the command line wins",
    metavar="FILE",
)
DEVICE_FLAG = Flag(
    ("--device",),
    values.one_of("auto", "cpu", "npu", "cuda", "sim"),
    "where the model runs; auto takes an accelerator if there is one; sim waits instead of "
    "computing, for measurements (docs/simulated-device.md)",
    metavar="{auto,cpu,npu,cuda,sim}",
)
CPU_DEVICES_FLAG = Flag(
    ("--cpu-devices",),
    values.positive_integer,
    "ranks that this node may run on its CPU; default: its cores",
)
MASTER_FLAGS = (
    Flag(
        ("--master-addr",),
        values.text,
        "address of the head's control service, which workers dial",
        metavar="HOST",
    ),
    Flag(
        ("--master-port",),
        values.port,
        f"port of the head's control service (default: {DEFAULT_MASTER_PORT}; a free one where "
        "one serve starts all workers)",
        metavar="PORT",
    ),
)
SERVE_GROUPS = (
    FlagGroup(
        "mesh",
        (
            Flag(
                ("--tensor-parallel-size", "-tp"),
                values.positive_integer,
                "devices that share each layer",
            ),
            Flag(
                ("--pipeline-parallel-size", "-pp"),
                values.positive_integer,
                "stages that the layers are cut into",
            ),
            Flag(
                ("--pp-layer-partition",),
                values.partition,
                "layers per stage, like 32,29 (also VLLM_PP_LAYER_PARTITION)",
                metavar="N,N,...",
                environment=PARTITION_ENV,
                source_field="pp_layer_partition_source",
                environment_agrees=True,
            ),
            Flag(
                ("--data-parallel-size", "-dp"),
                values.positive_integer,
                "replicas of the whole pipeline behind one gateway",
            ),
            DEVICE_FLAG,
            Flag(
                ("--sim-cost",),
                values.text,
                "JSON file with what steps cost with --device sim; default: nothing",
                metavar="FILE",
            ),
            CPU_DEVICES_FLAG,
            Flag(
                ("--step-trace",),
                values.text,
                "write when each stage computed each step to this file, for ui.perfetto.dev",
                metavar="FILE",
            ),
        ),
    ),
    FlagGroup(
        "several nodes",
        (
            Flag(
                ("--distributed-executor-backend",),
                values.one_of("mp", "ray"),
                "how ranks are started: mp, as processes of each node; ray, as actors of the "
                "cluster that RAY_ADDRESS names, or of one on this machine",
                metavar="{mp,ray}",
            ),
            Flag(
                ("--nnodes",),
                values.positive_integer,
                "nodes that share the ranks evenly, node by node",
            ),
            Flag(("--node-rank",), values.natural_integer, "number of this node; 0 is the head"),
            *MASTER_FLAGS,
            Flag(
                ("--headless",),
                values.switch,
                "run this node's stage workers only; needed on every node but the head",
                arity=Arity.SWITCH,
            ),
            WAIT_FOR_HEAD_FLAG,
            Flag(
                ("--join-timeout-seconds",),
                values.positive_seconds,
                "how long the head waits for every stage worker (default: 300)",
                metavar="SECONDS",
            ),
        ),
    ),
    FlagGroup("security (docs/security.md)", TLS_FLAGS),
    FlagGroup("recovery (docs/recovery.md)", RECOVERY_FLAGS),
    FlagGroup(
        "front doors",
        (
            Flag(("--host",), values.text, "address to listen on", metavar="HOST"),
            Flag(("--port",), values.port, "REST port; 0 takes a free one", metavar="PORT"),
            Flag(("--grpc-port",), values.port, "gRPC port; 0 takes a free one", metavar="PORT"),
            *DOOR_FLAGS,
            Flag(
                ("--served-model-name",),
                values.texts,
                "names that clients may use for the model; default: MODEL, of a path the last part",
                metavar="NAME",
                arity=Arity.MANY,
            ),
            Flag(
                ("--drain-timeout",),
                values.seconds,
                "how long running requests may go on after SIGTERM (docs/operations.md)",
                metavar="SECONDS",
            ),
        ),
    ),
    FlagGroup(
        "model",
        (
            Flag(
                ("--dtype",),
                values.one_of("auto", "float32", "bfloat16", "float16"),
                "type of weights and activations; auto follows model and device",
                metavar="{auto,float32,bfloat16,float16}",
            ),
            Flag(
                ("--max-model-len",),
                values.token_count_or_auto,
                "longest prompt and answer together, in tokens; default: the model's",
            ),
            Flag(
                ("--tokenizer",),
                values.text,
                "another tokenizer: a directory with tokenizer.json, or a Hub repository id",
                metavar="NAME",
            ),
            Flag(
                ("--chat-template",),
                values.text,
                "file with a chat template, or the template itself",
                metavar="FILE",
            ),
            Flag(
                ("--generation-config",),
                values.generation_config,
                "auto: sampling defaults of the model; none: no defaults; or a directory",
                metavar="{auto,none,DIR}",
            ),
            Flag(
                ("--trust-remote-code",),
                values.switch,
                "accepted for compatibility: no code of a checkpoint is ever run",
                arity=Arity.SWITCH,
            ),
            Flag(
                ("--seed",),
                values.seed,
                "makes the seeds of requests that bring none repeatable",
            ),
        ),
    ),
    FlagGroup(
        "scheduling and memory",
        (
            Flag(
                ("--max-num-seqs",),
                values.positive_integer,
                "most sequences at a time, over all batches in flight",
            ),
            Flag(("--max-num-batched-tokens",), values.token_count, "most tokens in one step"),
            Flag(
                ("--max-queued-requests",),
                values.natural_integer,
                "sequences that may wait for a slot, in each replica; more are refused with 429",
            ),
            Flag(
                ("--scheduling-policy",),
                values.one_of("fcfs", "priority"),
                "fcfs: in order of arrival; priority: requests with a lower priority value first",
                metavar="{fcfs,priority}",
            ),
            Flag(
                ("--async-scheduling",),
                values.switch,
                "send a sequence's next step while its token is still being sampled (default: on "
                "with --device sim; off on a CPU, whose cores the gateway needs itself, and on "
                "accelerators, where it has not been measured)",
                arity=Arity.SWITCH,
            ),
            Flag(
                ("--pp-async-batch-depth",),
                values.batch_depth,
                "batches in flight beyond one for each stage (docs/pipeline-parallelism.md)",
            ),
            Flag(
                ("--enable-prefix-caching",),
                values.switch,
                "keep what was computed for prompts that begin alike (default: on)",
                arity=Arity.SWITCH,
            ),
            Flag(("--block-size",), values.positive_integer, "tokens in one KV cache block"),
            Flag(
                ("--kv-cache-memory-bytes",),
                values.size,
                "KV cache per device, plain or like 4G; default: from the device's memory",
                metavar="BYTES",
            ),
            Flag(
                ("--gpu-memory-utilization",),
                values.fraction,
                "share of an accelerator's memory to use",
                metavar="SHARE",
            ),
            Flag(
                ("--enforce-eager",),
                values.switch,
                "run operators one by one (always so in this version: no graphs are captured)",
                arity=Arity.SWITCH,
            ),
        ),
    ),
    FlagGroup(
        "what vLLM Ascend combines (docs/compatibility.md)",
        (
            Flag(
                ("--prefill-context-parallel-size",),
                values.positive_integer,
                "ranks that share a prompt's tokens; above 1 is refused: not served yet",
            ),
            Flag(
                ("--additional-config",),
                json_values.additional_config,
                "vLLM Ascend's options as JSON; what would switch something on is refused: "
                "not served yet (default: {})",
                metavar="JSON",
                is_object=True,
            ),
            Flag(
                ("--kv-transfer-config",),
                json_values.kv_transfer_config,
                "vLLM's KV transfer as JSON; a connector is refused: not served yet (default: {})",
                metavar="JSON",
                is_object=True,
            ),
            Flag(
                ("--interconnect",),
                values.one_of(*INTERCONNECTS),
                "what joins the NPUs of different nodes; it is checked, not configured: HCCL "
                "chooses its links by its own variables",
                metavar="{auto,hccs,roce}",
            ),
        ),
    ),
)

STAGE_WORKER_GROUPS = (
    FlagGroup("head", MASTER_FLAGS),
    FlagGroup("security (docs/security.md)", TLS_FLAGS),
    FlagGroup(
        "worker",
        (
            Flag(
                ("--host",),
                values.text,
                "address that this worker listens on and announces",
                metavar="HOST",
            ),
            Flag(("--port",), values.port, "port; default: 0, a free one", metavar="PORT"),
            Flag(("--node-rank",), values.natural_integer, "number of this node, from 0"),
            Flag(
                ("--pp-rank",),
                values.natural_integer,
                "the stage that this worker wants; default: the head chooses",
            ),
            Flag(("--dp-rank",), values.natural_integer, "the replica that this worker is part of"),
            Flag(
                ("--tp-rank-start",),
                values.natural_integer,
                "first TP rank of this worker, where a stage spans nodes",
            ),
            DEVICE_FLAG,
            CPU_DEVICES_FLAG,
            Flag(
                ("--join-timeout-seconds",),
                values.positive_seconds,
                "how long to try to reach the head (default: 30)",
                metavar="SECONDS",
            ),
            WAIT_FOR_HEAD_FLAG,
            WORKER_STANDBY_FLAG,
            Flag(
                ("--fingerprint",),
                values.text,
                "the plan's fingerprint on this node",
                metavar="BASE64",
                hidden=True,
            ),
            Flag(
                ("--lifeline-fd",),
                values.natural_integer,
                "read end of a pipe that the launcher holds",
                hidden=True,
            ),
            Flag(
                ("--pulse-fd",),
                values.natural_integer,
                "write end of a pipe that the launcher listens to",
                hidden=True,
            ),
        ),
    ),
)


def all_flags(groups: Sequence[FlagGroup]) -> tuple[Flag, ...]:
    """Every flag of a command's groups, and `--config`."""
    return (*(flag for group in groups for flag in group.flags), CONFIG_FLAG)
