"""What a user asked for, after flags, file and environment are merged.

One frozen dataclass; the command line and the YAML file both fill it, under
the flags' names with underscores. Nothing here reads a model or a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.topology.additional_config import NO_ADDITIONAL_CONFIG, AdditionalConfig
from services.topology.kv_transfer import KvTransferConfig
from services.topology.partition import PARTITION_FLAG

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_GRPC_PORT = 8001
DEFAULT_MASTER_PORT = 29550
API_KEY_VARIABLE = "STAGEMESH_API_KEY"
TLS_DIR_VARIABLE = "STAGEMESH_TLS_DIR"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """`stagemesh serve` and `stagemesh gateway`. None means "decide from model and device"."""

    model: str
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    """Replicas of the whole TP x PP pipeline behind one gateway."""
    pp_layer_partition: tuple[int, ...] | None = None
    pp_layer_partition_source: str = PARTITION_FLAG
    """Where the partition stands, for messages: flag, file or variable."""
    distributed_executor_backend: str = "mp"
    """"mp" or "ray", which decides about nodes by itself."""
    nnodes: int = 1
    """Nodes that share the mesh's ranks evenly, node by node."""
    node_rank: int = 0
    """0 is the head, which runs the gateway."""
    headless: bool = False
    """Runs this node's stage workers only; needed on every node but the head."""
    wait_for_head: bool = False
    """The workers of a headless node wait for the head without limit, also when it has gone."""
    cpu_devices: int | None = None
    """Devices of a node without an accelerator; None counts its cores."""
    tls_dir: str | None = None
    """Directory with the CA's certificate and those of the roles on this node; None: no TLS."""
    require_tls: bool = False
    """Refuses ports without TLS."""
    insecure: bool = False
    """Allows a public --master-addr or --host without TLS."""
    join_timeout_seconds: float = 300.0
    """How long the head waits for every stage worker."""
    max_recovery_attempts: int = 3
    """Failures in a row, without a new token, that a request survives; with 0 the first failure
    of a stage ends the mesh."""
    recovery_timeout_seconds: float = 120.0
    """How long a replica may take to serve again after a failure; then the mesh ends."""
    standby: int = 0
    """Spare stage workers that this node starts: each takes over a place that is lost."""
    standby_stages: tuple[int, ...] = ()
    """Stages whose weights spares hold in advance: a spare for each entry, and for each part of a
    stage that spans nodes."""
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    grpc_port: int = DEFAULT_GRPC_PORT
    master_addr: str = DEFAULT_HOST
    master_port: int | None = None
    """Where the control service listens; 0 takes a free port. None: a free port where one
    `serve` starts all workers itself, else DEFAULT_MASTER_PORT."""
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    """Most sequences at a time, over all batches in flight."""
    max_num_batched_tokens: int = 512
    """Most query tokens in one step."""
    max_queued_requests: int = 1024
    """Sequences that may wait for a slot, in each replica; more are refused with 429."""
    scheduling_policy: str = "fcfs"
    """"fcfs" or "priority": who is served first, and preempted last."""
    async_scheduling: bool | None = None
    """Sends a sequence's next step while its token is still being sampled. None: where the
    device is not the CPU, whose cores the gateway needs itself."""
    pp_async_batch_depth: int = 0
    """Batches in flight beyond one for each stage."""
    enable_prefix_caching: bool = True
    """Keeps the KV blocks of what was computed, for prompts that begin alike."""
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    served_model_name: tuple[str, ...] = ()
    tokenizer: str | None = None
    chat_template: str | None = None
    generation_config: str = "auto"
    """"auto" reads generation_config.json of the model, "none" ignores it, else a directory."""
    seed: int | None = None
    """Makes the seeds that the gateway draws repeatable."""
    api_key: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str | None = None
    """File with the hashes of more keys; read again when it changes."""
    ssl_certfile: str | None = None
    """The REST door's certificate; None: HTTP without TLS."""
    ssl_keyfile: str | None = None
    allowed_origins: tuple[str, ...] = ()
    """Web pages whose scripts may read the REST door's answers."""
    device: str = "auto"
    sim_cost: str | None = None
    """File with what steps cost on simulated devices."""
    step_trace: str | None = None
    """File that gets a line for each step of each stage."""
    enforce_eager: bool = False
    trust_remote_code: bool = False
    prefill_context_parallel_size: int = 1
    additional_config: AdditionalConfig = NO_ADDITIONAL_CONFIG
    kv_transfer_config: KvTransferConfig | None = None
    drain_timeout: float = 20.0
    """Seconds that running requests get after SIGTERM."""
    interconnect: str = "auto"
    """What joins the devices of different nodes, as the user says: "auto", "hccs" or "roce"."""


@dataclass(frozen=True, slots=True)
class StageWorkerConfig:
    """`stagemesh stage-worker`: one stage on one node."""

    master_addr: str = DEFAULT_HOST
    master_port: int = DEFAULT_MASTER_PORT
    tls_dir: str | None = None
    """Directory with the CA's certificate and this worker's; None: no TLS."""
    require_tls: bool = False
    """Refuses a mesh without TLS."""
    insecure: bool = False
    """Allows a public --master-addr without TLS."""
    host: str = DEFAULT_HOST
    """Address that this worker's service listens on and announces."""
    port: int = 0
    """0 takes a free port."""
    node_rank: int = 0
    dp_rank: int = 0
    """The replica that this worker wants a stage of."""
    pp_rank: int | None = None
    """The stage that this worker wants; None lets the head choose."""
    tp_rank_start: int = 0
    """First TP rank that this worker wants, where a stage spans nodes."""
    fingerprint: str | None = None
    """Set by a local launcher: the plan's fingerprint as this node sees it, base64."""
    cpu_devices: int | None = None
    """Devices of a node without an accelerator; None counts its cores."""
    device: str = "auto"
    join_timeout_seconds: float = 30.0
    wait_for_head: bool = False
    """Waits for the head without limit, at first and when it has gone: with its weights."""
    standby: bool = False
    """It is a spare: it takes over a place that is lost."""
    lifeline_fd: int | None = None
    """Read end of a pipe whose other end the launcher holds: when it closes, the worker leaves."""
    pulse_fd: int | None = None
    """Write end of a pipe on which the launcher hears that the worker runs."""
