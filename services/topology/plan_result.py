"""What `stagemesh plan` is asked, and what it answers: plain data, and nothing is worked out here.

Field names of `Plan` and its parts are the keys of `stagemesh plan --json` (docs/plan.md).
Bytes are those of one rank, a layer range is half open, and None means "not known from
what was given", where a field does not say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.topology.additional_config import NO_ADDITIONAL_CONFIG, AdditionalConfig
from services.topology.kv_transfer import KvTransferConfig
from services.topology.partition import PARTITION_FLAG
from services.topology.recommend import Advice, Recommendation


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What was asked for. None means "decide from the model" or "not known"."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    pp_layer_partition: tuple[int, ...] | None = None
    pp_layer_partition_source: str = PARTITION_FLAG
    """Where the partition stands, for messages: flag, file or variable."""
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    nnodes: int = 1
    devices_per_node: int | None = None
    device_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    concurrency: int | None = None
    prefill_context_parallel_size: int = 1
    additional_config: AdditionalConfig = NO_ADDITIONAL_CONFIG
    kv_transfer_config: KvTransferConfig | None = None
    interconnect: str = "auto"


@dataclass(frozen=True, slots=True)
class PlanModel:
    """The model, as far as it decides about memory."""

    architecture: str
    served: bool
    not_served_reason: str | None
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    attention: str
    """"latent" (MLA), "multi-head", "grouped-query" or "multi-query"."""
    num_experts: int
    """0 for a dense model."""
    num_experts_per_token: int
    quantization: str | None
    checkpoint_dtype: str
    tie_word_embeddings: bool
    sliding_window: int | None
    """Of a model that uses one; the plan counts its KV cache as if it had none."""


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """The layout that is planned."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    pp_layer_partition: tuple[int, ...]
    dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    devices_needed: int
    nnodes: int
    devices_per_node: int
    enough_devices: bool
    device_memory_bytes: int | None
    available_bytes: int | None
    """Of one device: what `--gpu-memory-utilization` allows."""
    reserve_bytes: int | None
    """Of one device: the rest, for runtime, communicators and fragmentation."""


@dataclass(frozen=True, slots=True)
class PlanStage:
    """One stage: what each of its ranks holds."""

    pp_rank: int
    layer_start: int
    layer_end: int
    nodes: tuple[int, ...]
    """Node ranks of the first replica; empty where devices do not suffice."""
    weight_bytes: int
    embedding_bytes: int
    """Of `weight_bytes`."""
    head_bytes: int
    """Of `weight_bytes`; 0 where the head is the embedding of the same stage."""
    activation_bytes: int
    kv_bytes_per_token: int
    kv_block_bytes: int
    possible_blocks: int | None
    """What this stage alone has room for."""
    usable_blocks: int | None
    """What the mesh uses: the least of all stages."""
    kv_cache_bytes: int
    """Of the usable blocks; where those are not known or do not suffice, of one sequence of
    the greatest length."""
    predicted_peak_bytes: int
    """Weights, activations, KV cache and reserve."""
    required_bytes: int
    """The least that would do, without the reserve."""
    fits: bool | None
    missing_bytes: int
    """How much memory is short; 0 where it fits or is not known."""


@dataclass(frozen=True, slots=True)
class PlanKv:
    """The KV cache of one replica."""

    usable_blocks: int | None
    usable_tokens: int | None
    needed_blocks: int
    """Of one sequence of the greatest length."""
    weakest_stage: int | None


@dataclass(frozen=True, slots=True)
class Bubble:
    """Share of stage time that is idle when so many independent batches run through once."""

    concurrency: int
    idle_share: float


@dataclass(frozen=True, slots=True)
class Balance:
    """The cut that is most even by the weights that a step reads: layers and LM head."""

    pp_layer_partition: tuple[int, ...]
    largest_step_bytes: int
    current_largest_step_bytes: int
    heaviest_stage: int
    """Of the layout that is planned."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All of it."""

    schema_version: int
    model: PlanModel
    layout: PlanLayout
    stages: tuple[PlanStage, ...]
    kv_cache: PlanKv
    fits: bool | None
    """Memory of every stage and number of devices."""
    bubble: tuple[Bubble, ...]
    balance: Balance | None
    """None where the cut is as even as it gets, or there is one stage."""
    fitting_partition: tuple[int, ...] | None
    """Only where memory does not suffice: a cut of the same TP and PP size that would fit."""
    parallelism: Advice | None
    """TP against PP; None without a pipeline."""
    recommendation: Recommendation | None
    """Where to start with the devices that were given; None where nothing fits them, or where
    their memory is not known."""
    smallest_fit: Recommendation | None
    """The fewest devices that would hold the model; only where the layout does not fit."""
