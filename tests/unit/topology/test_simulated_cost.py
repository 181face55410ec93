"""The file behind --sim-cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.config import ServeConfig
from services.errors import ConfigError
from services.mesh_plan import make_plan
from services.topology.simulated_cost import MAX_FILE_BYTES, StageCost, read_stage_costs
from tests.unit.topology.model_directory import ModelDirectory


def costs(tmp_path: Path, content: object, pp_size: int = 2) -> tuple[StageCost, ...]:
    path = tmp_path / "cost.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_stage_costs(path, pp_size)


def test_a_stage_changes_single_numbers_of_the_common_cost(tmp_path: Path) -> None:
    found = costs(
        tmp_path,
        {
            "every_stage": {"fixed_seconds": 0.02, "per_token_seconds": 0.001},
            "stages": {"1": {"fixed_seconds": 0.05, "per_context_token_seconds": 1e-6}},
        },
    )
    assert found == (StageCost(0.02, 0.001), StageCost(0.05, 0.001, 1e-6))


def test_what_is_not_named_costs_nothing(tmp_path: Path) -> None:
    assert costs(tmp_path, {}) == (StageCost(), StageCost())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ({"stage": {}}, 'unknown key "stage"; known: every_stage, stages'),
        ({"every_stage": 3}, "every_stage must be an object with fixed_seconds"),
        ({"every_stage": {"fixed": 1}}, 'every_stage has unknown "fixed"; known: fixed_seconds'),
        ({"every_stage": {"fixed_seconds": -1}}, r"every_stage\.fixed_seconds must be .* got -1"),
        ({"every_stage": {"fixed_seconds": 31}}, "from 0 to 30, got 31"),
        ({"every_stage": {"fixed_seconds": True}}, "got True"),
        ({"every_stage": {"fixed_seconds": "1"}}, "got '1'"),
        ('{"every_stage": {"fixed_seconds": NaN}}', "got nan"),
        ({"stages": [{}]}, "stages must be an object like"),
        ({"stages": {"2": {}}}, 'stages has "2", and this mesh has the stages 0 to 1'),
        ({"stages": {"0": {"x": 1}}}, 'stages.0 has unknown "x"'),
        (" " * (MAX_FILE_BYTES + 1), "is larger than"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        costs(tmp_path, content)
    assert "--sim-cost" in refused.value.message
    assert "\n" not in refused.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--sim-cost .*none\.json cannot be read: No such file"):
        read_stage_costs(tmp_path / "none.json", 1)


def test_a_plan_of_simulated_devices_needs_no_weights(tmp_path: Path) -> None:
    model = ModelDirectory(tmp_path / "model").path
    cost = tmp_path / "cost.json"
    cost.write_text('{"every_stage": {"fixed_seconds": 0.5}}')
    config = ServeConfig(
        model=str(model), pipeline_parallel_size=3, device="sim", sim_cost=str(cost)
    )
    plan = make_plan(config, model, "here")
    assert plan.device == "sim"
    assert [cost.fixed_seconds for cost in plan.stage_plan.simulated_costs] == [0.5] * 3


def test_a_cost_without_simulated_devices_is_refused(tmp_path: Path) -> None:
    directory = ModelDirectory(tmp_path / "model")
    directory.write_single()
    config = ServeConfig(model=str(directory.path), sim_cost="cost.json")
    with pytest.raises(ConfigError, match="--sim-cost is for simulated devices, and --device is"):
        make_plan(config, directory.path, "here")
