"""What cannot be combined: one table of rules, each with its condition, reason and remedy. Pure.

    RULES                      the table; docs/compatibility.md is made from it (`make docs`)
    broken_rules(request)      the rules that a request breaks, in the table's order
    check_compatibility(...)   raises with the first one's message

`serve`, `gateway`, every headless node, `plan` and the ranks ask this one table. A rule whose
feature Stagemesh does not have at all comes after those that name what it clashes with, so that
nothing that was asked for is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.config import ServeConfig
from services.errors import ConfigError
from services.topology.additional_config import (
    SPARSE_KV_KEY,
    XLITE_KEY,
)
from services.topology.facts import ModelFacts
from services.topology.families import (
    TP_SIZE_FLAG,
    family_supports_pp,
    tp_obstacle,
    valid_tp_sizes,
)
from services.topology.kv_transfer import MOONCAKE_CONNECTOR
from services.topology.partition import PP_SIZE_FLAG, check_stage_count
from services.topology.plan_result import PlanSettings
from services.topology.rule import BrokenRule, Finding, MeshRequest, Rule

PCP_SIZE_FLAG = "--prefill-context-parallel-size"
ADDITIONAL_CONFIG_FLAG = "--additional-config"
KV_TRANSFER_FLAG = "--kv-transfer-config"
INTERCONNECT_FLAG = "--interconnect"
STANDBY_FLAG = "--standby"
INTERCONNECTS = ("auto", "hccs", "roce")

_ASCEND = "https://github.com/vllm-project/vllm-ascend"


def request_of(
    settings: ServeConfig | PlanSettings,
    *,
    facts: ModelFacts | None = None,
    device: str | None = None,
) -> MeshRequest:
    """What a command's settings ask for. `device` is the kind that "auto" came to, if it did."""
    if device is None and settings.device != "auto":
        device = settings.device
    return MeshRequest(
        tp_size=settings.tensor_parallel_size,
        pp_size=settings.pipeline_parallel_size,
        dp_size=settings.data_parallel_size,
        nnodes=settings.nnodes,
        prefill_context_parallel_size=settings.prefill_context_parallel_size,
        additional=settings.additional_config,
        kv_transfer=settings.kv_transfer_config,
        standby=isinstance(settings, ServeConfig)
        and bool(settings.standby or settings.standby_stages),
        backend=settings.distributed_executor_backend
        if isinstance(settings, ServeConfig)
        else "mp",
        interconnect=settings.interconnect,
        device=device,
        facts=facts,
    )


def broken_rules(request: MeshRequest) -> tuple[BrokenRule, ...]:
    """Every rule that the request breaks, in the table's order."""
    return tuple(_broken(request))


def _broken(request: MeshRequest) -> Iterator[BrokenRule]:
    for rule in RULES:
        finding = rule.find(request)
        if finding is not None:
            yield BrokenRule(rule, finding)


def check_compatibility(request: MeshRequest) -> None:
    """Raises `ConfigError` with the first broken rule's message and the others' names."""
    broken = broken_rules(request)
    if broken:
        others = ", ".join(each.rule.name for each in broken[1:])
        more = f"; also broken: {others}" if others else ""
        raise ConfigError(broken[0].message + more, param=broken[0].rule.param)


def check_topology(facts: ModelFacts, tp_size: int, pp_size: int) -> None:
    """Raises unless the model can be cut into `pp_size` stages of `tp_size` ranks:
    `PartitionError` for more stages than layers, `ConfigError` for what the table says."""
    check_stage_count(facts.num_hidden_layers, pp_size)
    check_compatibility(MeshRequest(tp_size=tp_size, pp_size=pp_size, facts=facts))


def _pp(request: MeshRequest) -> str:
    return f"{PP_SIZE_FLAG} {request.pp_size}"


def _context_parallel(request: MeshRequest, *, with_pp: bool) -> Finding | None:
    size = request.prefill_context_parallel_size
    if size == 1 or (request.pp_size > 1) is not with_pp:
        return None
    return Finding(f"{PCP_SIZE_FLAG} {size}" + (f" with {_pp(request)}" if with_pp else ""))


def _additional(request: MeshRequest, key: str, enabled: bool, *, with_pp: bool) -> Finding | None:
    if not enabled or (request.pp_size > 1) is not with_pp:
        return None
    asked = f"{ADDITIONAL_CONFIG_FLAG} {key}.enabled = true"
    return Finding(asked + (f" with {_pp(request)}" if with_pp else ""))


def _xlite(request: MeshRequest, *, with_pp: bool) -> Finding | None:
    return _additional(request, XLITE_KEY, request.additional.xlite_graph, with_pp=with_pp)


def _sparse_kv(request: MeshRequest, *, with_pp: bool) -> Finding | None:
    enabled = request.additional.sparse_kv_offload
    return _additional(request, SPARSE_KV_KEY, enabled, with_pp=with_pp)


def _mooncake_decode_pp(request: MeshRequest) -> Finding | None:
    parts = () if request.kv_transfer is None else request.kv_transfer.with_parts()
    for part in parts:
        if part.kv_connector != MOONCAKE_CONNECTOR:
            continue
        if part.decode is not None and part.decode.pp_size > 1:
            return Finding(
                f"{KV_TRANSFER_FLAG} {MOONCAKE_CONNECTOR} with decode.pp_size {part.decode.pp_size}"
            )
        if part.decodes and request.pp_size > 1:
            return Finding(
                f"{KV_TRANSFER_FLAG} {MOONCAKE_CONNECTOR} with kv_role {part.kv_role} and "
                f"{_pp(request)}"
            )
    return None


def _kv_transfer(request: MeshRequest) -> Finding | None:
    if request.kv_transfer is None or _mooncake_decode_pp(request) is not None:
        return None
    transfer = request.kv_transfer
    return Finding(f"{KV_TRANSFER_FLAG} {transfer.kv_connector} with kv_role {transfer.kv_role}")


def _experts_over_roce(request: MeshRequest) -> Finding | None:
    facts = request.facts
    if facts is None or facts.moe is None or request.interconnect != "roce":
        return None
    if request.nnodes == 1 or request.pp_size == 1 or request.dp_size == 1:
        return None
    return Finding(
        f"{facts.architecture} with {facts.moe.num_experts} experts on --nnodes {request.nnodes} "
        f"over {INTERCONNECT_FLAG} roce with {_pp(request)} and "
        f"--data-parallel-size {request.dp_size}"
    )


def _no_pipeline(request: MeshRequest) -> Finding | None:
    facts = request.facts
    if facts is None or request.pp_size == 1 or family_supports_pp(facts.architecture):
        return None
    return Finding(f"{facts.architecture} with {_pp(request)}")


def _heads(request: MeshRequest) -> Finding | None:
    if request.facts is None:
        return None
    obstacle = tp_obstacle(request.facts, request.tp_size)
    if obstacle is None:
        return None
    sizes = ", ".join(str(size) for size in valid_tp_sizes(request.facts))
    return Finding(
        f"tensor parallel size {request.tp_size} {obstacle}",
        f"sizes that work for this model: {sizes}",
    )


def _links_without_npu(request: MeshRequest) -> Finding | None:
    if request.interconnect == "auto" or request.device in (None, "npu"):
        return None
    return Finding(f"{INTERCONNECT_FLAG} {request.interconnect} with --device {request.device}")


def _standby_on_ray(request: MeshRequest) -> Finding | None:
    if not request.standby or request.backend != "ray":
        return None
    return Finding(f"{STANDBY_FLAG} with --distributed-executor-backend ray")


def _standby_of_uneven_parts(request: MeshRequest) -> Finding | None:
    share, left = divmod(request.tp_size * request.pp_size * request.dp_size, request.nnodes)
    if not request.standby or left or share % request.tp_size == 0 or request.tp_size % share == 0:
        return None
    return Finding(
        f"{STANDBY_FLAG} with {TP_SIZE_FLAG} {request.tp_size} and {share} ranks on each of "
        f"--nnodes {request.nnodes}"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "pp-with-prefill-context-parallelism",
        f"`{PCP_SIZE_FLAG}` above 1 with `{PP_SIZE_FLAG}` above 1",
        "prefill context parallelism cuts a prompt's tokens over ranks, and a stage hands all "
        "tokens of a step to the next one",
        f"use {PCP_SIZE_FLAG} 1 and let the pipeline cut long prompts (--max-num-batched-tokens)",
        PCP_SIZE_FLAG,
        lambda request: _context_parallel(request, with_pp=True),
    ),
    Rule(
        "pp-with-xlite-graph",
        f"`{XLITE_KEY}.enabled` in `{ADDITIONAL_CONFIG_FLAG}` with `{PP_SIZE_FLAG}` above 1",
        "Xlite runs the whole model as one graph on every rank, and a stage has only some of its "
        "layers",
        f"leave {XLITE_KEY} out, or use {PP_SIZE_FLAG} 1",
        ADDITIONAL_CONFIG_FLAG,
        lambda request: _xlite(request, with_pp=True),
        f"{_ASCEND}/blob/main/vllm_ascend/ascend_config.py",
    ),
    Rule(
        "pp-with-sparse-kv-offload",
        f"`{SPARSE_KV_KEY}.enabled` in `{ADDITIONAL_CONFIG_FLAG}` with `{PP_SIZE_FLAG}` above 1",
        "sparse KV offload plans host memory for ranks that hold every layer, and is for decode "
        "sides of one stage",
        f"leave {SPARSE_KV_KEY} out, or use {PP_SIZE_FLAG} 1",
        ADDITIONAL_CONFIG_FLAG,
        lambda request: _sparse_kv(request, with_pp=True),
        f"{_ASCEND}/blob/main/vllm_ascend/ascend_config.py",
    ),
    Rule(
        "mooncake-decode-pp",
        f"`{MOONCAKE_CONNECTOR}` in `{KV_TRANSFER_FLAG}` with a decode side of more than one "
        "stage: `kv_connector_extra_config.decode.pp_size` above 1, or `kv_role` `kv_consumer` "
        f"or `kv_both` with `{PP_SIZE_FLAG}` above 1",
        f"{MOONCAKE_CONNECTOR} hands the KV cache of all layers to each decode rank, so only the "
        "prefill side may have stages",
        f"use one stage (pp_size 1, {PP_SIZE_FLAG} 1) on the decode side",
        KV_TRANSFER_FLAG,
        _mooncake_decode_pp,
        f"{_ASCEND}/pull/4054",
    ),
    Rule(
        "roce-experts-with-pp-and-dp",
        f"a mixture of experts on several nodes with `{INTERCONNECT_FLAG} roce`, "
        f"`{PP_SIZE_FLAG}` above 1 and `--data-parallel-size` above 1",
        "between nodes the replicas' exchange of expert tokens needs HCCS once there are stages; "
        "over RoCE it is not supported",
        f"use --data-parallel-size 1 or {PP_SIZE_FLAG} 1, keep the mesh on one node, or use nodes "
        "that HCCS joins",
        INTERCONNECT_FLAG,
        _experts_over_roce,
        f"{_ASCEND}/issues/15254",
    ),
    Rule(
        "family-without-pp",
        f"a model family that cannot be cut into stages with `{PP_SIZE_FLAG}` above 1",
        "this family's layers cannot be cut into stages",
        f"use {PP_SIZE_FLAG} 1; a larger {TP_SIZE_FLAG} divides the memory as well",
        PP_SIZE_FLAG,
        _no_pipeline,
    ),
    Rule(
        "tp-does-not-divide",
        f"`{TP_SIZE_FLAG}` that does not divide the attention heads or the MLP (in whole FP8 "
        "blocks), or that neither divides the KV heads nor is a multiple of them",
        "every rank of a stage computes whole heads and an equal part of the MLP",
        "use a size that the refusal names",
        TP_SIZE_FLAG,
        _heads,
    ),
    Rule(
        "interconnect-without-npu",
        f"`{INTERCONNECT_FLAG} hccs` or `roce` on devices other than NPUs",
        "HCCS and RoCE here are the links between Ascend NPUs",
        f"use {INTERCONNECT_FLAG} auto, or --device npu",
        INTERCONNECT_FLAG,
        _links_without_npu,
    ),
    Rule(
        "standby-of-uneven-parts",
        f"`{STANDBY_FLAG}` where nodes hold different numbers of a stage's ranks",
        "every spare has as many ranks as the place that it takes over, and here places differ",
        "use a number of nodes (--nnodes) with which all parts of stages are alike",
        STANDBY_FLAG,
        _standby_of_uneven_parts,
    ),
    Rule(
        "standby-with-ray",
        f"`{STANDBY_FLAG}` with `--distributed-executor-backend ray`",
        "Ray's launcher starts one actor for each rank of the mesh, and no spares",
        "leave one of them out; without spares a lost actor is started again",
        STANDBY_FLAG,
        _standby_on_ray,
    ),
    Rule(
        "prefill-context-parallelism-not-served",
        f"`{PCP_SIZE_FLAG}` above 1 with one stage",
        "prefill context parallelism is not served yet",
        f"use {PCP_SIZE_FLAG} 1; long prompts are cut into chunks (--max-num-batched-tokens)",
        PCP_SIZE_FLAG,
        lambda request: _context_parallel(request, with_pp=False),
    ),
    Rule(
        "xlite-graph-not-served",
        f"`{XLITE_KEY}.enabled` in `{ADDITIONAL_CONFIG_FLAG}` with one stage",
        "Xlite graph mode is not served yet",
        f"leave {XLITE_KEY} out",
        ADDITIONAL_CONFIG_FLAG,
        lambda request: _xlite(request, with_pp=False),
    ),
    Rule(
        "sparse-kv-offload-not-served",
        f"`{SPARSE_KV_KEY}.enabled` in `{ADDITIONAL_CONFIG_FLAG}` with one stage",
        "sparse KV offload is not served yet",
        f"leave {SPARSE_KV_KEY} out",
        ADDITIONAL_CONFIG_FLAG,
        lambda request: _sparse_kv(request, with_pp=False),
    ),
    Rule(
        "kv-transfer-not-served",
        f"any other connector in `{KV_TRANSFER_FLAG}`",
        "handing KV cache from prefill to decode instances is not served yet",
        f"leave {KV_TRANSFER_FLAG} out: one mesh does both",
        KV_TRANSFER_FLAG,
        _kv_transfer,
    ),
)
"""In the order in which they are looked at: first what clashes, then what is not there yet."""
