"""From what a user asked for to the plan that every stage gets. Torch-free, no network.

Everything that can be refused before a process is started is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from services.config import ServeConfig
from services.errors import ConfigError, ModelError
from services.launch.devices import SIMULATED, resolve_device
from services.launch.memory import host_memory
from services.topology.checkpoint import check_weights, inspect_checkpoint, without_weights
from services.topology.compatibility import broken_rules, check_compatibility, request_of
from services.topology.facts import MeshShape, ModelFacts
from services.topology.families import (
    read_model_facts,
    resolve_dtype,
    resolve_max_model_len,
)
from services.topology.fingerprint import build_fingerprint
from services.topology.fit import check_fit, check_kv_cache, host_pool
from services.topology.layouts import Demand, default_partition
from services.topology.partition import check_stage_count, resolve_partition
from services.topology.placement import (
    NodeDevices,
    StagePlacement,
    check_devices,
    check_spares,
    place,
    ranks_per_node,
)
from services.topology.planfacts import read_planned_model
from services.topology.simulated_cost import SIM_COST_FLAG, StageCost, read_stage_costs
from services.topology.wire import shape_to_proto
from stagemesh.v1 import stage_worker_pb2, topology_pb2

MOST_CACHED_BLOCKS = 1 << 17
"""Blocks that are kept for prefixes at most, where running requests could not take more: two
million tokens at 16 a block. The gateway makes its books of so many in 2.3 ms (of a million in
36 ms), and a small model's default cache on a CPU would have that million."""


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """A mesh that can be started."""

    facts: ModelFacts
    shape: MeshShape
    placements: tuple[StagePlacement, ...]
    """Of all nodes, in order of world rank."""
    device: str
    num_devices: int
    """Of this node; 0 where others start the workers."""
    dtype: str
    max_model_len: int
    fingerprint: topology_pb2.Fingerprint
    stage_plan: stage_worker_pb2.StagePlan
    """What is the same for all stages; placement and num_blocks are filled in for each."""
    keeps_prefixes: bool
    """Whether blocks are of use when their request is over."""

    def placements_of(self, node_rank: int) -> tuple[StagePlacement, ...]:
        """The stage workers of one node."""
        return tuple(p for p in self.placements if p.node_rank == node_rank)

    def placements_of_stages(self, stages: Iterable[int]) -> tuple[StagePlacement, ...]:
        """The places of whole stages, of one replica: all have the same weights."""
        return tuple(
            p for stage in stages for p in self.placements if (p.dp_rank, p.pp_rank) == (0, stage)
        )

    @property
    def demand(self) -> Demand:
        """What every stage's memory is measured against."""
        plan = self.stage_plan
        return Demand(
            dtype=self.dtype,
            block_size=plan.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            available_bytes=None,
            kv_cache_bytes=plan.kv_cache_memory_bytes or None,
        )

    @property
    def blocks_per_sequence(self) -> int:
        """KV blocks of one sequence of full length."""
        return math.ceil(self.max_model_len / self.stage_plan.block_size)

    @property
    def wanted_blocks(self) -> int:
        """KV blocks on each rank that are of use, where there is room: those of all running
        requests at full length, and what the prefix cache keeps of earlier ones."""
        running = self.blocks_per_sequence * self.stage_plan.max_num_seqs
        return max(running, MOST_CACHED_BLOCKS) if self.keeps_prefixes else running


def make_plan(
    config: ServeConfig, model_path: Path, node: str, *, own_devices: bool = True
) -> MeshPlan:
    """Resolves a configuration against a model directory and this node's devices.

    Without `own_devices` the workers are started by somebody else, on nodes that
    are not known yet: the device kind is taken from the flag, nothing is counted
    here, and device indices are handed out when workers join.
    Raises `ModelError`, `PartitionError` or `ConfigError`, each naming what to change.
    """
    facts = _served_facts(config, model_path)
    check_stage_count(facts.num_hidden_layers, config.pipeline_parallel_size)
    device, num_devices = _devices(config, own_devices)
    check_compatibility(request_of(config, facts=facts, device=device))
    partition = partition_of(config, facts, device)
    costs = _simulated_costs(config)
    if config.device == SIMULATED:
        checkpoint = without_weights(model_path)
    else:
        checkpoint = inspect_checkpoint(model_path)
        check_weights(checkpoint, facts)
    shape = MeshShape(
        dp_size=config.data_parallel_size,
        tp_size=config.tensor_parallel_size,
        pp_size=config.pipeline_parallel_size,
        pp_layer_partition=partition,
    )
    placements = _place(config, shape, NodeDevices(config.node_rank, node, device, num_devices))
    dtype = resolve_dtype(config.dtype, facts, device)
    max_model_len = resolve_max_model_len(config.max_model_len, facts)
    fingerprint = build_fingerprint(
        checkpoint,
        shape,
        dtype=dtype,
        block_size=config.block_size,
        nnodes=config.nnodes,
        interconnect=config.interconnect,
    )
    return MeshPlan(
        facts=facts,
        shape=shape,
        placements=placements,
        device=device,
        num_devices=num_devices or 0,
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
            simulated_costs=[cost.to_proto() for cost in costs],
        ),
        keeps_prefixes=config.enable_prefix_caching,
    )


def check_memory(plan: MeshPlan, node_rank: int, node: str) -> None:
    """Raises `ConfigError` where this node's stages will not fit its memory, or a KV cache of the
    size that was given is too small for one sequence.

    On a CPU the free memory is known before any process is started. What accelerators have
    free their ranks tell, before they load (`gateway.fit`).
    """
    check_kv_cache(plan.facts, plan.shape, plan.demand)
    own = plan.placements_of(node_rank)
    memory = host_memory()
    if plan.device != "cpu" or memory is None or not own:
        return
    pool = host_pool(f"node {node_rank} ({node})", memory.available_bytes, own)
    others = {place.node_rank for place in plan.placements} - {node_rank}
    alike = [
        host_pool(f"node {rank}", memory.available_bytes, plan.placements_of(rank))
        for rank in others
    ]
    check_fit(plan.facts, plan.shape, plan.demand, [pool], if_alike=alike)


def _simulated_costs(config: ServeConfig) -> tuple[StageCost, ...]:
    """By PP rank; empty where the devices are real."""
    if config.device == SIMULATED:
        if config.sim_cost is None:
            return (StageCost(),) * config.pipeline_parallel_size
        return read_stage_costs(Path(config.sim_cost), config.pipeline_parallel_size)
    if config.sim_cost is not None:
        raise ConfigError(
            f"{SIM_COST_FLAG} is for simulated devices, and --device is {config.device}; "
            "give --device sim, or leave the cost out",
            param=SIM_COST_FLAG,
        )
    return ()


def _served_facts(config: ServeConfig, model_path: Path) -> ModelFacts:
    """What is known of a model that is served. A rule that another one would break as well is
    said with the refusal, so that nobody prepares a layout that will be refused later."""
    try:
        return read_model_facts(model_path)
    except ModelError as error:
        try:
            planned = read_planned_model(model_path / "config.json")
        except ModelError:
            raise error from None
        broken = broken_rules(request_of(config, facts=planned.facts))
        besides = "".join(f". Besides, {rule.message}" for rule in broken)
        raise ModelError(error.message + besides, param=error.param) from None


def partition_of(config: ServeConfig, facts: ModelFacts, device: str) -> tuple[int, ...]:
    """Layers by stage, on devices of one kind. Raises `PartitionError`."""
    tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
    check_stage_count(facts.num_hidden_layers, pp_size)
    return resolve_partition(
        facts.num_hidden_layers,
        pp_size,
        config.pp_layer_partition,
        config.pp_layer_partition_source,
        default_partition(facts, tp_size, pp_size, device),
    )


def _devices(config: ServeConfig, own_devices: bool) -> tuple[str, int | None]:
    """(device kind, devices of this node); None where others start the workers."""
    if own_devices:
        return resolve_device(config.device, config.cpu_devices)
    return (resolve_device("auto")[0] if config.device == "auto" else config.device), None


def _place(config: ServeConfig, shape: MeshShape, own: NodeDevices) -> tuple[StagePlacement, ...]:
    """Placements on all nodes; on one of any size where its devices are not known."""
    if own.num_devices is None:
        return place(shape, [own])
    share = ranks_per_node(shape, config.nnodes)
    where = f"node {own.node_rank} ({own.node})"
    check_devices(shape, share, own.device, own.num_devices, where)
    spares = config.standby
    check_spares(shape, config.nnodes, spares, own.device, own.num_devices, where)
    nodes = [NodeDevices(rank, f"node {rank}", own.device, share) for rank in range(config.nnodes)]
    return place(shape, nodes)
