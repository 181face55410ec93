"""From what a user asked for to the plan that every stage gets. Torch-free, no network.

Everything that can be refused before a process is started is refused here.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from services.config import ServeConfig
from services.launch.devices import resolve_device
from services.topology.checkpoint import check_weights, inspect_checkpoint
from services.topology.facts import MeshShape, ModelFacts
from services.topology.families import (
    check_topology,
    read_model_facts,
    resolve_dtype,
    resolve_max_model_len,
)
from services.topology.fingerprint import build_fingerprint
from services.topology.partition import PARTITION_ENV, resolve_partition
from services.topology.placement import NodeDevices, StagePlacement, place
from services.topology.wire import shape_to_proto
from stagemesh.v1 import stage_worker_pb2, topology_pb2


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """A mesh that can be started."""

    facts: ModelFacts
    shape: MeshShape
    placements: tuple[StagePlacement, ...]
    device: str
    dtype: str
    max_model_len: int
    fingerprint: topology_pb2.Fingerprint
    stage_plan: stage_worker_pb2.StagePlan
    """What is the same for all stages; placement and num_blocks are filled in for each."""

    @property
    def blocks_per_sequence(self) -> int:
        """KV blocks of one sequence of full length."""
        return math.ceil(self.max_model_len / self.stage_plan.block_size)


def make_plan(config: ServeConfig, model_path: Path, node: str) -> MeshPlan:
    """Resolves a configuration against a model directory and this node's devices.

    Raises `ModelError`, `PartitionError` or `ConfigError`, each naming what to change.
    """
    facts = read_model_facts(model_path)
    check_topology(facts, config.tensor_parallel_size, config.pipeline_parallel_size)
    partition = resolve_partition(
        facts.num_hidden_layers,
        config.pipeline_parallel_size,
        config.pp_layer_partition,
        os.environ.get(PARTITION_ENV),
    )
    checkpoint = inspect_checkpoint(model_path)
    check_weights(checkpoint, facts)
    shape = MeshShape(
        dp_size=1,
        tp_size=config.tensor_parallel_size,
        pp_size=config.pipeline_parallel_size,
        pp_layer_partition=partition,
    )
    device, num_devices = resolve_device(config.device)
    placements = place(shape, [NodeDevices(0, node, device, num_devices)])
    dtype = resolve_dtype(config.dtype, facts, device)
    max_model_len = resolve_max_model_len(config.max_model_len, facts)
    fingerprint = build_fingerprint(checkpoint, shape, dtype=dtype, block_size=config.block_size)
    return MeshPlan(
        facts=facts,
        shape=shape,
        placements=placements,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        fingerprint=fingerprint,
        stage_plan=stage_worker_pb2.StagePlan(
            topology=shape_to_proto(shape),
            model_path=str(model_path),
            dtype=dtype,
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes or 0,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enforce_eager=config.enforce_eager,
            trust_remote_code=config.trust_remote_code,
            fingerprint=fingerprint,
        ),
    )
