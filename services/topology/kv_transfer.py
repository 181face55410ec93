"""`--kv-transfer-config`: how prefill and decode instances would hand over KV cache.

Fields as in `KVTransferConfig` of vLLM (vllm/config/kv_transfer.py). The sizes of both sides in
`kv_connector_extra_config` are vLLM Ascend's (its MooncakeConnector; `pp_size` since
https://github.com/vllm-project/vllm-ascend/pull/4054, decode side 1 only).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from services.topology.json_options import Options, shown

MOONCAKE_CONNECTOR = "MooncakeConnectorV1"
KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_KEYS = (
    "kv_connector",
    "kv_role",
    "kv_port",
    "kv_connector_extra_config",
    "engine_id",
    "kv_rank",
    "kv_parallel_size",
    "kv_ip",
    "kv_buffer_device",
    "kv_buffer_size",
    "kv_connector_module_path",
    "enable_permute_local_kv",
    "kv_load_failure_policy",
)
_SIDE_KEYS = ("tp_size", "pp_size", "dp_size", "pp_layer_partition")
MAX_CONNECTORS = 16


@dataclass(frozen=True, slots=True)
class SideSizes:
    """One side of a prefill/decode pair, as the other one is told."""

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1


@dataclass(frozen=True, slots=True)
class KvTransferConfig:
    """What is asked for."""

    kv_connector: str
    kv_role: str
    """One of `KV_ROLES`."""
    kv_port: int | None = None
    prefill: SideSizes | None = None
    decode: SideSizes | None = None
    connectors: tuple[KvTransferConfig, ...] = ()
    """What a MultiConnector is made of."""

    @property
    def decodes(self) -> bool:
        """Whether this instance is (also) the decode side."""
        return self.kv_role in ("kv_consumer", "kv_both")

    def with_parts(self) -> Iterator[KvTransferConfig]:
        """This connector and all that it is made of."""
        yield self
        for part in self.connectors:
            yield from part.with_parts()


def read_kv_transfer_config(content: Mapping[str, object]) -> KvTransferConfig | None:
    """Reads the object; None where it asks for nothing.

    Raises `ValueError` for a key that vLLM does not have, a value of another kind, or a
    connector without its role.
    """
    return _read(content, "", depth=0)


def _read(content: Mapping[str, object], where: str, depth: int) -> KvTransferConfig | None:
    options = Options(content, _KEYS, where)
    if options.absent("kv_connector"):
        given = [key for key in content if not options.absent(key)]
        if not given:
            return None
        raise ValueError(
            f"has {', '.join(given)} and no kv_connector; name one, or leave the rest out"
        )
    connector = options.text("kv_connector")
    role = "" if options.absent("kv_role") else options.text("kv_role")
    if role not in KV_ROLES:
        raise ValueError(
            f"has kv_connector {shown(connector)} with kv_role {shown(role) or 'missing'}; "
            f"kv_role must be one of {', '.join(KV_ROLES)}"
        )
    # Every connector has keys of its own there, so others than those of both sides are let be.
    sides = options.section("kv_connector_extra_config", None)
    parts = sides.objects("connectors") if depth == 0 else ()
    if len(parts) > MAX_CONNECTORS:
        raise ValueError(f"has {len(parts)} connectors in one; at most {MAX_CONNECTORS}")
    read = (
        _read(part, f"{sides.where}.connectors[{index}]", depth + 1)
        for index, part in enumerate(parts)
    )
    return KvTransferConfig(
        kv_connector=connector,
        kv_role=role,
        kv_port=None if options.absent("kv_port") else options.port("kv_port"),
        prefill=_side(sides, "prefill"),
        decode=_side(sides, "decode"),
        connectors=tuple(part for part in read if part is not None),
    )


def _side(options: Options, key: str) -> SideSizes | None:
    if options.absent(key):
        return None
    side = options.section(key, _SIDE_KEYS)
    return SideSizes(
        tp_size=side.count("tp_size", default=1),
        pp_size=side.count("pp_size", default=1),
        dp_size=side.count("dp_size", default=1),
    )
