"""The table of what cannot be combined: each rule's message, what it lets pass, and its page."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config import ServeConfig
from services.errors import ConfigError
from services.topology.additional_config import AdditionalConfig
from services.topology.compatibility import (
    RULES,
    broken_rules,
    check_compatibility,
    request_of,
)
from services.topology.facts import ModelFacts
from services.topology.families import FAMILIES
from services.topology.kv_transfer import KvTransferConfig, SideSizes
from services.topology.plan_result import PlanSettings
from services.topology.planfacts import read_planned_model
from services.topology.rule import MeshRequest
from tests.unit.topology.model_directory import ModelDirectory
from tests.unit.topology.published_configs import DEEPSEEK_V3, write_config
from tools.documents import compatibility_page, drift, generate, main

ROOT = Path(__file__).resolve().parents[3]
XLITE = AdditionalConfig(xlite_graph=True)
SPARSE = AdditionalConfig(sparse_kv_offload=True)
ROCE_MESH = MeshRequest(
    tp_size=8, pp_size=2, dp_size=2, nnodes=4, interconnect="roce", device="npu"
)


def mooncake(role: str, *, decode_pp: int = 1) -> KvTransferConfig:
    return KvTransferConfig("MooncakeConnectorV1", role, decode=SideSizes(pp_size=decode_pp))


@pytest.fixture
def experts(tmp_path: Path) -> ModelFacts:
    return read_planned_model(write_config(tmp_path / "deepseek-v3", DEEPSEEK_V3)).facts


@pytest.fixture
def dense(tmp_path: Path) -> ModelFacts:
    return ModelDirectory(tmp_path / "tiny").facts()


def refusal(request: MeshRequest) -> str:
    with pytest.raises(ConfigError) as caught:
        check_compatibility(request)
    return caught.value.message


@pytest.mark.parametrize(
    ("request_", "rule", "message"),
    [
        (
            MeshRequest(pp_size=4, prefill_context_parallel_size=2),
            "pp-with-prefill-context-parallelism",
            "--prefill-context-parallel-size 2 with --pipeline-parallel-size 4: prefill context "
            "parallelism cuts a prompt's tokens over ranks, and a stage hands all tokens of a step "
            "to the next one; use --prefill-context-parallel-size 1",
        ),
        (
            MeshRequest(pp_size=3, tp_size=4, nnodes=4, standby=True),
            "standby-of-uneven-parts",
            "--standby with --tensor-parallel-size 4 and 3 ranks on each of --nnodes 4: every",
        ),
        (
            MeshRequest(standby=True, backend="ray"),
            "standby-with-ray",
            "--standby with --distributed-executor-backend ray: Ray's launcher starts one actor",
        ),
        (
            MeshRequest(pp_size=2, additional=XLITE),
            "pp-with-xlite-graph",
            "--additional-config xlite_graph_config.enabled = true with --pipeline-parallel-size "
            "2: Xlite runs the whole model as one graph on every rank, and a stage has only some "
            "of its layers; leave xlite_graph_config out, or use --pipeline-parallel-size 1",
        ),
        (
            MeshRequest(pp_size=2, additional=SPARSE),
            "pp-with-sparse-kv-offload",
            "--additional-config sparse_kv_offload_config.enabled = true with "
            "--pipeline-parallel-size 2: sparse KV offload plans host memory for ranks that hold "
            "every layer, and is for decode sides of one stage; leave sparse_kv_offload_config "
            "out, or use --pipeline-parallel-size 1",
        ),
        (
            MeshRequest(kv_transfer=mooncake("kv_producer", decode_pp=2)),
            "mooncake-decode-pp",
            "--kv-transfer-config MooncakeConnectorV1 with decode.pp_size 2: MooncakeConnectorV1 "
            "hands the KV cache of all layers to each decode rank, so only the prefill side may "
            "have stages; use one stage (pp_size 1, --pipeline-parallel-size 1) on the decode side",
        ),
        (
            MeshRequest(pp_size=2, kv_transfer=mooncake("kv_consumer")),
            "mooncake-decode-pp",
            "--kv-transfer-config MooncakeConnectorV1 with kv_role kv_consumer and "
            "--pipeline-parallel-size 2: ",
        ),
        (
            MeshRequest(pp_size=2, kv_transfer=mooncake("kv_both")),
            "mooncake-decode-pp",
            "with kv_role kv_both and --pipeline-parallel-size 2: ",
        ),
        (
            MeshRequest(
                kv_transfer=KvTransferConfig(
                    "MultiConnector",
                    "kv_producer",
                    connectors=(mooncake("kv_producer", decode_pp=3),),
                )
            ),
            "mooncake-decode-pp",
            "--kv-transfer-config MooncakeConnectorV1 with decode.pp_size 3: ",
        ),
        (
            MeshRequest(interconnect="hccs", device="cpu"),
            "interconnect-without-npu",
            "--interconnect hccs with --device cpu: HCCS and RoCE here are the links between "
            "Ascend NPUs; use --interconnect auto, or --device npu",
        ),
        (
            MeshRequest(prefill_context_parallel_size=2),
            "prefill-context-parallelism-not-served",
            "--prefill-context-parallel-size 2: prefill context parallelism is not served yet; "
            "use --prefill-context-parallel-size 1",
        ),
        (
            MeshRequest(additional=XLITE),
            "xlite-graph-not-served",
            "--additional-config xlite_graph_config.enabled = true: Xlite graph mode is not served "
            "yet; leave xlite_graph_config out",
        ),
        (
            MeshRequest(additional=SPARSE),
            "sparse-kv-offload-not-served",
            "--additional-config sparse_kv_offload_config.enabled = true: sparse KV offload is not "
            "served yet; leave sparse_kv_offload_config out",
        ),
        (
            MeshRequest(pp_size=2, kv_transfer=mooncake("kv_producer")),
            "kv-transfer-not-served",
            "--kv-transfer-config MooncakeConnectorV1 with kv_role kv_producer: handing KV cache "
            "from prefill to decode instances is not served yet; leave --kv-transfer-config out",
        ),
        (
            MeshRequest(pp_size=2, kv_transfer=KvTransferConfig("NixlConnector", "kv_both")),
            "kv-transfer-not-served",
            "--kv-transfer-config NixlConnector with kv_role kv_both: ",
        ),
    ],
)
def test_a_refusal_says_what_was_asked_why_not_and_what_to_do(
    request_: MeshRequest, rule: str, message: str
) -> None:
    assert message in refusal(request_)
    assert refusal(request_).endswith(f" (rule {rule})")
    assert [broken.rule.name for broken in broken_rules(request_)] == [rule]


def test_experts_over_roce_with_stages_and_replicas(experts: ModelFacts) -> None:
    assert refusal(replace(ROCE_MESH, facts=experts)) == (
        "DeepseekV3ForCausalLM with 256 experts on --nnodes 4 over --interconnect roce with "
        "--pipeline-parallel-size 2 and --data-parallel-size 2: between nodes the replicas' "
        "exchange of expert tokens needs HCCS once there are stages; over RoCE it is not "
        "supported; use --data-parallel-size 1 or --pipeline-parallel-size 1, keep the mesh on one "
        "node, or use nodes that HCCS joins (rule roce-experts-with-pp-and-dp)"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"pp_size": 1},
        {"dp_size": 1},
        {"nnodes": 1},
        {"interconnect": "hccs"},
        {"interconnect": "auto"},
    ],
)
def test_experts_are_fine_where_one_part_of_it_is_not_there(
    experts: ModelFacts, change: dict[str, object]
) -> None:
    check_compatibility(replace(ROCE_MESH, facts=experts, **change))  # type: ignore[arg-type]


def test_a_dense_model_may_use_roce(dense: ModelFacts) -> None:
    check_compatibility(replace(ROCE_MESH, tp_size=1, facts=dense))


def test_a_family_without_stages(dense: ModelFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replace(FAMILIES["LlamaForCausalLM"], supports_pp=False)
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", whole)  # type: ignore[arg-type]
    assert refusal(MeshRequest(pp_size=2, facts=dense)) == (
        "LlamaForCausalLM with --pipeline-parallel-size 2: this family's layers cannot be cut into "
        "stages; use --pipeline-parallel-size 1; a larger --tensor-parallel-size divides the "
        "memory as well (rule family-without-pp)"
    )
    check_compatibility(MeshRequest(pp_size=1, facts=dense))


def test_heads_that_do_not_divide_name_the_sizes_that_do(dense: ModelFacts) -> None:
    assert refusal(MeshRequest(tp_size=4, facts=dense)) == (
        "tensor parallel size 4 does not divide the 6 attention heads: "
        "every rank of a stage computes whole heads and an equal part of the MLP; sizes that work "
        "for this model: 1, 2, 6 (rule tp-does-not-divide)"
    )


def test_more_than_one_broken_rule_are_all_named() -> None:
    asked = MeshRequest(pp_size=2, prefill_context_parallel_size=2, additional=XLITE)
    assert refusal(asked).endswith(
        "(rule pp-with-prefill-context-parallelism); also broken: pp-with-xlite-graph"
    )


def test_every_rule_can_be_told_apart() -> None:
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))
    for rule in RULES:
        for text in (rule.condition, rule.reason, rule.remedy):
            assert "\n" not in text and not text.endswith((".", ";", " ")), rule.name


@given(
    size=st.integers(1, 4),
    pp_size=st.integers(1, 4),
    additional=st.builds(AdditionalConfig, st.booleans(), st.booleans()),
    transfer=st.none() | st.builds(mooncake, st.sampled_from(["kv_producer", "kv_consumer"])),
    interconnect=st.sampled_from(["auto", "hccs", "roce"]),
    device=st.sampled_from([None, "npu", "cpu"]),
)
def test_whatever_would_do_nothing_is_refused(
    size: int,
    pp_size: int,
    additional: AdditionalConfig,
    transfer: KvTransferConfig | None,
    interconnect: str,
    device: str | None,
) -> None:
    request = MeshRequest(
        pp_size=pp_size,
        prefill_context_parallel_size=size,
        additional=additional,
        kv_transfer=transfer,
        interconnect=interconnect,
        device=device,
    )
    asked = (
        (size > 1)
        + additional.xlite_graph
        + additional.sparse_kv_offload
        + (transfer is not None)
        + (interconnect != "auto" and device == "cpu")
    )
    assert len(broken_rules(request)) == asked


def test_serve_and_plan_ask_alike() -> None:
    assert request_of(ServeConfig(model="m")) == request_of(PlanSettings()) == MeshRequest()
    changes = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "data_parallel_size": 4,
        "nnodes": 5,
        "prefill_context_parallel_size": 6,
        "additional_config": XLITE,
        "kv_transfer_config": mooncake("kv_both"),
        "interconnect": "roce",
        "device": "npu",
    }
    serve = request_of(replace(ServeConfig(model="m"), **changes))  # type: ignore[arg-type]
    assert serve == request_of(replace(PlanSettings(), **changes))  # type: ignore[arg-type]
    # Who starts ranks, and spares, is nothing that `plan` is asked.
    for field in fields(MeshRequest):
        if field.name not in ("facts", "standby", "backend"):
            assert getattr(serve, field.name) != field.default, field.name


def test_the_page_is_the_table() -> None:
    assert drift(ROOT) == ()
    rows = [line for line in compatibility_page().splitlines() if line.startswith("| `")]
    for rule in RULES:
        (row,) = [row for row in rows if row.startswith(f"| `{rule.name}` |")]
        assert rule.reason in row and rule.remedy in row


def test_a_page_that_was_changed_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    assert drift(tmp_path) == ("docs/compatibility.md is missing; run `make docs`",)
    generate(tmp_path)
    assert drift(tmp_path) == ()
    page = tmp_path / "docs" / "compatibility.md"
    page.write_text(page.read_text("utf-8") + "\n", encoding="utf-8")
    assert "differs from what its table gives" in drift(tmp_path)[0]
    assert main(["drift"]) == 0
    assert capsys.readouterr().out == ""
