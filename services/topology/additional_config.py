"""`--additional-config`: what vLLM Ascend's users switch on with it, as far as it is known here.

Key names and their meaning: `AscendConfig`, `XliteGraphConfig` and `SparseKVOffloadConfig` in
vllm_ascend/ascend_config.py of https://github.com/vllm-project/vllm-ascend, and its page
https://docs.vllm.ai/projects/ascend/en/latest/user_guide/configuration/additional_config.html
(read in November 2026). Only keys with which a rule of `services.topology.compatibility` deals
are read; another one of vLLM Ascend's is refused by its name, since it would do nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.topology.json_options import Options

XLITE_KEY = "xlite_graph_config"
SPARSE_KV_KEY = "sparse_kv_offload_config"
_XLITE_KEYS = ("enabled", "full_mode")
_SPARSE_KV_KEYS = ("enabled", "topk_buffer_size", "dram_size_per_dp_GB", "keep_device_kv_cache")

# vLLM Ascend's defaults; they only matter where the feature is on, which is refused.
_TOPK_BUFFER_SIZE = 4096
_DRAM_SIZE_PER_DP_GB = 128

OTHER_ASCEND_KEYS = frozenset(
    {
        "ascend_compilation_config",
        "ascend_fusion_config",
        "ascend_log_path",
        "batch_job_sched_config",
        "c8_enable_reshape_optim",
        "dfx_config",
        "dfx_config_path",
        "draft_window_size",
        "dump_config",
        "dump_config_path",
        "dynamic_spec_config",
        "enable_async_exponential",
        "enable_balance_scheduling",
        "enable_context_parallel",
        "enable_cpu_binding",
        "enable_dsa_cp",
        "enable_flashcomm1",
        "enable_fused_mc2",
        "enable_kv_nz",
        "enable_matmul_allreduce",
        "enable_mc2_hierarchy_comm",
        "enable_mlapo",
        "enable_npugraph_ex",
        "enable_prefill_mc2",
        "enable_reduce_sample",
        "enable_shared_expert_dp",
        "enable_sparse_c8",
        "enable_sparse_li_c8",
        "enable_sparse_sfa_c8",
        "enable_transpose_kv_cache_by_block",
        "eplb_config",
        "finegrained_tp_config",
        "flashcomm2_parallel_size",
        "layer_sharding",
        "mega_moe_max_tokens",
        "mix_placement",
        "msmonitor_use_daemon",
        "multistream_dsv4_dsa_overlap",
        "multistream_overlap_gate",
        "multistream_overlap_shared_expert",
        "pa_shape_list",
        "profiling_chunk_config",
        "recompute_scheduler_enable",
        "refresh",
        "rejection_sampler_config",
        "rl_config",
        "scheduler_config",
        "short_request_first_config",
        "SLO_limits_for_dynamic_batch",
        "weight_nz_mode",
        "weight_prefetch_config",
    }
)
"""Keys of vLLM Ascend that nothing here answers to."""


@dataclass(frozen=True, slots=True)
class AdditionalConfig:
    """What is switched on. Nothing by default."""

    xlite_graph: bool = False
    """`xlite_graph_config.enabled`: the whole model as one graph of openEuler's Xlite."""
    sparse_kv_offload: bool = False
    """`sparse_kv_offload_config.enabled`: KV cache of sparse attention in host memory."""


NO_ADDITIONAL_CONFIG = AdditionalConfig()


def read_additional_config(content: Mapping[str, object]) -> AdditionalConfig:
    """Reads the object. Raises `ValueError` for a key that is not known, or a value of
    another kind than vLLM Ascend takes."""
    for key in content:
        if key in OTHER_ASCEND_KEYS:
            raise ValueError(
                f"has {key}, which vLLM Ascend knows and Stagemesh does not (yet); leave it out"
            )
    options = Options(content, (XLITE_KEY, SPARSE_KV_KEY))
    xlite = options.section(XLITE_KEY, _XLITE_KEYS)
    xlite.boolean("full_mode", default=False)
    sparse = options.section(SPARSE_KV_KEY, _SPARSE_KV_KEYS)
    sparse.count("topk_buffer_size", default=_TOPK_BUFFER_SIZE)
    sparse.count("dram_size_per_dp_GB", default=_DRAM_SIZE_PER_DP_GB)
    sparse.boolean("keep_device_kv_cache", default=False)
    return AdditionalConfig(
        xlite_graph=xlite.boolean("enabled", default=False),
        sparse_kv_offload=sparse.boolean("enabled", default=False),
    )
