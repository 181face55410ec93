"""Options that are JSON objects: what they read, and what they say where they cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.json_values import additional_config, json_object, kv_transfer_config
from services.cli.settings import UsageError
from services.errors import ConfigError
from services.topology.additional_config import AdditionalConfig
from services.topology.kv_transfer import KvTransferConfig, SideSizes
from tests.unit.cli.test_settings import parse, write

MOONCAKE = {
    "kv_connector": "MooncakeConnectorV1",
    "kv_role": "kv_producer",
    "kv_port": "36000",
    "engine_id": "0",
    "kv_connector_extra_config": {
        "use_ascend_direct": True,
        "prefill": {"pp_size": 2, "dp_size": 1, "tp_size": 8},
        "decode": {"dp_size": 32, "tp_size": 1},
    },
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON: Expecting property name enclosed in double quotes at line 1"),
        ('{"a": 1,\n "b": }', "is not valid JSON: Expecting value at line 2, column 7"),
        ("[]", "must be a JSON object"),
        ("3", "must be a JSON object"),
        ('{"a": 1, "a": 2}', "has the key a twice"),
        ('{"a": NaN}', "holds NaN, which is not JSON"),
        ('{"a":' + "[" * 100_000, "is nested too deeply"),
    ],
)
def test_what_is_no_object_says_where(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        json_object(text)
    assert message in str(caught.value)


def test_yaml_can_say_it_as_a_mapping_only_with_text_keys() -> None:
    assert json_object({"a": {"b": 1}}) == {"a": {"b": 1}}
    with pytest.raises(ValueError, match="has the key 3; keys must be texts"):
        json_object({3: "x"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="must be a JSON object"):
        json_object(["a"])


def test_nothing_asks_for_nothing() -> None:
    assert additional_config("{}") == AdditionalConfig()
    assert kv_transfer_config("{}") is None


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_text_is_no_json(text: str) -> None:
    for read in (additional_config, kv_transfer_config):
        with pytest.raises(ValueError, match=r"^is empty, which is not JSON"):
            read(text)


@pytest.mark.parametrize("flag", ["--additional-config", "--kv-transfer-config", "--dtype"])
@pytest.mark.parametrize(
    "text", ["{" + "x" * 5000, "[\x1b[31m\n", '{"\\u001b' + "k" * 5000 + '": 1}']
)
def test_what_was_written_is_shown_short_and_visible(flag: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse("m", flag, text)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"xlite_graph_config": {"enabled": True}}, AdditionalConfig(xlite_graph=True)),
        ({"xlite_graph_config": {"enabled": False, "full_mode": True}}, AdditionalConfig()),
        ({"xlite_graph_config": {}}, AdditionalConfig()),
        (
            {"sparse_kv_offload_config": {"enabled": True, "topk_buffer_size": 2048}},
            AdditionalConfig(sparse_kv_offload=True),
        ),
    ],
)
def test_additional_config(content: dict[str, object], expected: AdditionalConfig) -> None:
    assert additional_config(json.dumps(content)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"xlite_graf_config": {}},
            "has the unknown key xlite_graf_config (did you mean xlite_graph_config?); known keys: "
            "xlite_graph_config, sparse_kv_offload_config",
        ),
        (
            {"enable_flashcomm1": True},
            "has enable_flashcomm1, which vLLM Ascend knows and Stagemesh does not (yet)",
        ),
        (
            {"xlite_graph_config": {"enable": True}},
            "has the unknown key xlite_graph_config.enable (did you mean enabled?)",
        ),
        (
            {"xlite_graph_config": {"enabled": "true"}},
            "has xlite_graph_config.enabled = 'true', which must be true or false",
        ),
        ({"xlite_graph_config": True}, "has xlite_graph_config = True, which must be an object"),
        (
            {"sparse_kv_offload_config": {"dram_size_per_dp_GB": 0}},
            "has sparse_kv_offload_config.dram_size_per_dp_GB = 0, which must be a whole number",
        ),
    ],
)
def test_a_wrong_additional_config(content: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        additional_config(json.dumps(content))
    assert message in str(caught.value)


def test_kv_transfer_config() -> None:
    assert kv_transfer_config(json.dumps(MOONCAKE)) == KvTransferConfig(
        kv_connector="MooncakeConnectorV1",
        kv_role="kv_producer",
        kv_port=36000,
        prefill=SideSizes(tp_size=8, pp_size=2, dp_size=1),
        decode=SideSizes(tp_size=1, pp_size=1, dp_size=32),
    )
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": [MOONCAKE, {}]},
    }
    read = kv_transfer_config(json.dumps(several))
    assert read is not None
    names = [part.kv_connector for part in read.with_parts()]
    assert names == ["MultiConnector", "MooncakeConnectorV1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_conector": "x"}, "has the unknown key kv_conector (did you mean kv_connector?)"),
        ({"kv_connector": None}, "has kv_role, kv_port, engine_id"),
        ({"kv_connector": ""}, "has kv_connector = '', which must be a text that is not empty"),
        ({"kv_role": None}, "with kv_role missing; kv_role must be one of kv_producer"),
        ({"kv_role": "prefill"}, "with kv_role prefill; kv_role must be one of kv_producer"),
        ({"kv_port": "abc"}, "has kv_port = 'abc', which must be a port from 1 to 65535"),
        ({"kv_port": 65536}, "has kv_port = 65536, which must be a port from 1 to 65535"),
        ({"kv_port": True}, "has kv_port = True, which must be a port from 1 to 65535"),
        (
            {"kv_connector_extra_config": []},
            "has kv_connector_extra_config = [], which must be an object",
        ),
        (
            {"kv_connector_extra_config": {"decode": {"pp_size": 0}}},
            "has kv_connector_extra_config.decode.pp_size = 0, which must be a whole number",
        ),
        (
            {"kv_connector_extra_config": {"decode": {"pp": 2}}},
            "has the unknown key kv_connector_extra_config.decode.pp",
        ),
        (
            {"kv_connector_extra_config": {"connectors": [{"kv_role": "kv_both"}]}},
            "has kv_role and no kv_connector",
        ),
        (
            {"kv_connector_extra_config": {"connectors": {}}},
            "has kv_connector_extra_config.connectors = {}, which must be a list of objects",
        ),
    ],
)
def test_a_wrong_kv_transfer_config(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        kv_transfer_config(json.dumps(MOONCAKE | change))
    assert message in str(caught.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*MOONCAKE, "decode", "pp_size"]), inner)
        ),
        max_leaves=12,
    )
)
def test_any_json_is_read_or_refused_by_name(content: object) -> None:
    for read in (additional_config, kv_transfer_config):
        try:
            read(json.dumps(content))
        except ValueError as error:
            assert str(error) and "\n" not in str(error)


def test_the_flag_is_named_with_what_was_written() -> None:
    with pytest.raises(UsageError) as caught:
        parse("m", "--additional-config", '{"a": 1}')
    assert caught.value.message.startswith("--additional-config has the unknown key a; known keys")
    assert caught.value.param == "--additional-config"
    with pytest.raises(UsageError, match=r"--kv-transfer-config is not valid JSON: .* column 2"):
        parse("m", "--kv-transfer-config", "{")
    with pytest.raises(UsageError, match="--interconnect must be one of auto, hccs, roce"):
        parse("m", "--interconnect", "ib")
    with pytest.raises(UsageError, match="--prefill-context-parallel-size must be a whole number"):
        parse("m", "--prefill-context-parallel-size", "0")


def test_a_file_says_the_same_as_text_or_mapping(tmp_path: Path) -> None:
    texts = (
        'additional-config: \'{"xlite_graph_config": {"enabled": false}}\'\n',
        "additional_config: {xlite_graph_config: {enabled: false}}\n",
    )
    for text in texts:
        path = write(tmp_path, text + "kv-transfer-config: {}\ninterconnect: auto\n")
        config = parse("m", "--config", path)
        assert (config.additional_config, config.kv_transfer_config) == (AdditionalConfig(), None)
    path = write(tmp_path, "additional-config: {xlite: true}\n")
    with pytest.raises(UsageError) as caught:
        parse("m", "--config", path)
    assert caught.value.message.startswith(f"additional_config in {path} has the unknown key xlite")
    path = write(tmp_path, "pp: 2\n".replace("pp", "pipeline-parallel-size"))
    with pytest.raises(ConfigError, match="rule pp-with-xlite-graph"):
        parse(
            "m", "--config", path, "--additional-config", '{"xlite_graph_config":{"enabled":true}}'
        )
