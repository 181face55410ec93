"""Would `serve` accept this command line on this node? Every refusal, not only the first.

The checks are the functions that `serve` itself calls before it starts anything, so
the two cannot disagree; at the end the whole plan is made once, as `serve` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from services.config import ServeConfig
from services.doctor.findings import Check, Finding, Outcome, failed, ok, refused, warning
from services.doctor.gather import unreadable
from services.doctor.ray_check import check_ray, names_cluster
from services.errors import ModelError, PartitionError, StagemeshError
from services.launch.devices import KINDS, SIMULATED, present_devices, resolve_device
from services.mesh_plan import MeshPlan, make_plan, partition_of
from services.models.config_file import find_config
from services.models.demo import DEMO_MODELS
from services.models.resolve import is_repository_id, resolve_model
from services.topology.checkpoint import check_weights, inspect_checkpoint, without_weights
from services.topology.compatibility import broken_rules, request_of
from services.topology.facts import MeshShape, ModelFacts
from services.topology.families import read_model_facts, resolve_max_model_len
from services.topology.partition import PARTITION_FLAG, format_partition
from services.topology.placement import check_devices, check_spares, ranks_per_node
from services.units import counted, human_bytes

_T = TypeVar("_T")


class NodeDevices(NamedTuple):
    """What this node has, and what of the mesh it would hold."""

    kind: str
    num_devices: int
    num_ranks: int


class LayoutChecks:
    """Collects findings while it goes down the same path as `serve`."""

    def __init__(self, config: ServeConfig, host: str) -> None:
        self._config = config
        self._host = host
        self.findings: list[Finding] = []
        self._is_refused = False
        self.is_on_cluster = names_cluster(config)
        """Whether ranks run on nodes of Ray's choice, and this one may have none."""

    def _try(self, check: Check, action: Callable[[], _T]) -> _T | None:
        """The action's result; None where `serve` would be refused, which is noted."""
        try:
            return action()
        except StagemeshError as error:
            name = Check.PARTITION if isinstance(error, PartitionError) else check
            self._note(refused(name, error))
            self._is_refused = True
            return None

    def _note(self, finding: Finding) -> None:
        if finding not in self.findings:
            self.findings.append(finding)

    @property
    def _sizes(self) -> MeshShape:
        """The mesh without its layers: enough to count devices."""
        config = self._config
        pp_size = config.pipeline_parallel_size
        return MeshShape(
            config.data_parallel_size, config.tensor_parallel_size, pp_size, (1,) * pp_size
        )

    def devices(self) -> NodeDevices:
        """Are there as many devices as TP x PP x DP needs, here or on the Ray cluster?"""
        config, shape = self._config, self._sizes
        if config.distributed_executor_backend == "ray":
            found_on_ray, kind_on_ray = check_ray(config, shape)
            self._note(found_on_ray)
            if found_on_ray.outcome is Outcome.FAILED:
                self._is_refused = True
            if kind_on_ray is not None:
                # As `serve`: Ray says what the cluster has.
                self._config = replace(config, device=kind_on_ray)
            if self.is_on_cluster:
                return NodeDevices(self._config.device, 0, 0)
        found = self._try(Check.DEVICES, lambda: resolve_device(config.device, config.cpu_devices))
        share = self._try(Check.DEVICES, lambda: ranks_per_node(shape, config.nnodes))
        kind, count = found or (config.device, 0)
        if found is None or share is None:
            return NodeDevices(kind, count, share or 0)
        node = f"node {config.node_rank} ({self._host})"
        before = len(self.findings)
        spares = config.standby
        self._try(Check.DEVICES, lambda: check_devices(shape, share, kind, count, node))
        self._try(
            Check.DEVICES, lambda: check_spares(shape, config.nnodes, spares, kind, count, node)
        )
        if len(self.findings) > before:
            self._explain_hidden(kind, count)
            return NodeDevices(kind, count, share)
        needed = shape.world_size * shape.dp_size
        nodes = "" if config.nnodes == 1 else f", {share} on each of {config.nnodes} nodes"
        self._note(
            ok(
                Check.DEVICES,
                f"TP {shape.tp_size} x PP {shape.pp_size} x DP {shape.dp_size} needs "
                f"{counted(needed, 'device')}{nodes}; {node} has {count} ({kind})",
            )
        )
        return NodeDevices(kind, count, share)

    def _explain_hidden(self, kind: str, count: int) -> None:
        """Devices that are there and that the environment hides."""
        for known in KINDS:
            present = present_devices(known)
            if known.name == kind and present > count:
                self._note(
                    warning(
                        Check.DEVICES,
                        f"{known.visible_env} leaves {count} of {present} devices visible",
                        f"unset {known.visible_env}, or list more devices in it",
                    )
                )

    def model(self) -> Path | None:
        """Finds the model directory without downloading anything; checks that it can be read."""
        config = self._config
        is_remote = config.model not in DEMO_MODELS and is_repository_id(config.model)
        if is_remote and not Path(config.model).exists():
            try:
                return find_config(config.model).parent
            except ModelError as error:
                self._note(
                    warning(
                        Check.MODEL,
                        f"{error.message.partition(',')[0]}: serve would download it",
                        f"hf download {config.model} on every node, or copy the model there",
                    )
                )
                return None
        return self._try(Check.MODEL, lambda: resolve_model(config.model))

    def files(self, path: Path) -> ModelFacts | None:
        """Every file of the model is there, whole and readable."""
        facts = self._try(Check.MODEL, lambda: read_model_facts(path))
        simulated = self._config.device == SIMULATED
        inspect = without_weights if simulated else inspect_checkpoint
        checkpoint = self._try(Check.MODEL, lambda: inspect(path))
        if facts is None or checkpoint is None:
            return facts
        before = len(self.findings)
        if not simulated:
            self._try(Check.MODEL, lambda: check_weights(checkpoint, facts))
        names = [file.name for file in checkpoint.files]
        num_files = counted(len(names), "file")
        if not self._config.headless and self._config.tokenizer is None:
            names.append("tokenizer.json")
        for file in unreadable([path / name for name in names]):
            what = "cannot be read by this user" if file.exists() else "is missing"
            remedy = "chmod a+r" if file.exists() else "copy the model again"
            self._note(failed(Check.MODEL, f"{file} {what}", remedy))
        if len(self.findings) == before:
            self._note(
                ok(
                    Check.MODEL,
                    f"{path}: {facts.architecture}, {facts.num_hidden_layers} layers, "
                    f"{human_bytes(checkpoint.weight_bytes)} in {num_files}",
                )
            )
        return facts

    def partition(self, facts: ModelFacts, device: str) -> None:
        """Count, sum, and at least 1 layer for each stage."""
        config = self._config
        partition = self._try(
            Check.PARTITION,
            lambda: partition_of(config, facts, device),
        )
        if partition is not None:
            self._note(
                ok(
                    Check.PARTITION,
                    f"{format_partition(partition)}: {counted(len(partition), 'stage')}, "
                    f"{counted(sum(partition), 'layer')}",
                )
            )

    def compatibility(self, facts: ModelFacts | None, device: str) -> None:
        """Every rule of the table that is broken; those about the model where it is known."""
        broken = broken_rules(request_of(self._config, facts=facts, device=device))
        for each in broken:
            self._note(Finding(Check.COMPATIBILITY, Outcome.FAILED, each.message))
            self._is_refused = True
        if not broken:
            self._note(ok(Check.COMPATIBILITY, "nothing is combined that cannot be"))

    def plan(self, path: Path, facts: ModelFacts) -> MeshPlan | None:
        """The plan as `serve` makes it, where nothing above is in its way."""
        config = self._config
        length = self._try(Check.LAYOUT, lambda: resolve_max_model_len(config.max_model_len, facts))
        if self._is_refused or length is None:
            return None
        own_devices = config.distributed_executor_backend != "ray"
        plan = self._try(
            Check.LAYOUT, lambda: make_plan(config, path, self._host, own_devices=own_devices)
        )
        if plan is not None:
            words = f"{plan.dtype}, at most {length} tokens in a sequence; {self._stages(plan)}"
            self._note(ok(Check.LAYOUT, words))
        return plan

    def _stages(self, plan: MeshPlan) -> str:
        if self.is_on_cluster:
            return "Ray places the stages"
        stages = "; ".join(
            f"stage {place.pp_rank}: layers {place.layer_start} to {place.layer_end - 1} on "
            f"{counted(len(place.device_indices), 'device')}"
            for place in plan.placements_of(self._config.node_rank)
        )
        return f"here {stages or 'no stage'}"


def settings_findings(problems: tuple[StagemeshError, ...]) -> Iterator[Finding]:
    """Flags that cannot be used, or not together. `problems` come from the command line."""
    for problem in problems:
        yield refused(
            Check.PARTITION if problem.param == PARTITION_FLAG else Check.SETTINGS, problem
        )
    if not problems:
        yield ok(Check.SETTINGS, "the flags go together")
