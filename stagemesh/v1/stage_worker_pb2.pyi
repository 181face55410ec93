from stagemesh.v1 import step_pb2 as _step_pb2
from stagemesh.v1 import topology_pb2 as _topology_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ComponentState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPONENT_STATE_UNSPECIFIED: _ClassVar[ComponentState]
    COMPONENT_STATE_STARTING: _ClassVar[ComponentState]
    COMPONENT_STATE_LOADING: _ClassVar[ComponentState]
    COMPONENT_STATE_READY: _ClassVar[ComponentState]
    COMPONENT_STATE_DRAINING: _ClassVar[ComponentState]
    COMPONENT_STATE_FAILED: _ClassVar[ComponentState]
    COMPONENT_STATE_STANDBY: _ClassVar[ComponentState]

class RankPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RANK_PHASE_UNSPECIFIED: _ClassVar[RankPhase]
    RANK_PHASE_CONTROL_WAIT: _ClassVar[RankPhase]
    RANK_PHASE_RECEIVE: _ClassVar[RankPhase]
    RANK_PHASE_COMPUTE: _ClassVar[RankPhase]
    RANK_PHASE_SEND: _ClassVar[RankPhase]
COMPONENT_STATE_UNSPECIFIED: ComponentState
COMPONENT_STATE_STARTING: ComponentState
COMPONENT_STATE_LOADING: ComponentState
COMPONENT_STATE_READY: ComponentState
COMPONENT_STATE_DRAINING: ComponentState
COMPONENT_STATE_FAILED: ComponentState
COMPONENT_STATE_STANDBY: ComponentState
RANK_PHASE_UNSPECIFIED: RankPhase
RANK_PHASE_CONTROL_WAIT: RankPhase
RANK_PHASE_RECEIVE: RankPhase
RANK_PHASE_COMPUTE: RankPhase
RANK_PHASE_SEND: RankPhase

class OpenStoreRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class OpenStoreResponse(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class ResetRanksRequest(_message.Message):
    __slots__ = ("epoch", "replace", "placement", "standby")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    replace: bool
    placement: _topology_pb2.Placement
    standby: bool
    def __init__(self, epoch: _Optional[int] = ..., replace: _Optional[bool] = ..., placement: _Optional[_Union[_topology_pb2.Placement, _Mapping]] = ..., standby: _Optional[bool] = ...) -> None: ...

class ResetRanksResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FormGroupRequest(_message.Message):
    __slots__ = ("epoch", "store_address", "topology", "timeout_seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    store_address: str
    topology: _topology_pb2.Topology
    timeout_seconds: float
    def __init__(self, epoch: _Optional[int] = ..., store_address: _Optional[str] = ..., topology: _Optional[_Union[_topology_pb2.Topology, _Mapping]] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class FormGroupResponse(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class StagePlan(_message.Message):
    __slots__ = ("topology", "placement", "model_path", "dtype", "block_size", "num_blocks", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "kv_cache_memory_bytes", "gpu_memory_utilization", "enforce_eager", "trust_remote_code", "fingerprint", "simulated_costs")
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    ENFORCE_EAGER_FIELD_NUMBER: _ClassVar[int]
    TRUST_REMOTE_CODE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_COSTS_FIELD_NUMBER: _ClassVar[int]
    topology: _topology_pb2.Topology
    placement: _topology_pb2.Placement
    model_path: str
    dtype: str
    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    kv_cache_memory_bytes: int
    gpu_memory_utilization: float
    enforce_eager: bool
    trust_remote_code: bool
    fingerprint: _topology_pb2.Fingerprint
    simulated_costs: _containers.RepeatedCompositeFieldContainer[SimulatedCost]
    def __init__(self, topology: _Optional[_Union[_topology_pb2.Topology, _Mapping]] = ..., placement: _Optional[_Union[_topology_pb2.Placement, _Mapping]] = ..., model_path: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_model_len: _Optional[int] = ..., kv_cache_memory_bytes: _Optional[int] = ..., gpu_memory_utilization: _Optional[float] = ..., enforce_eager: _Optional[bool] = ..., trust_remote_code: _Optional[bool] = ..., fingerprint: _Optional[_Union[_topology_pb2.Fingerprint, _Mapping]] = ..., simulated_costs: _Optional[_Iterable[_Union[SimulatedCost, _Mapping]]] = ...) -> None: ...

class SimulatedCost(_message.Message):
    __slots__ = ("fixed_seconds", "per_token_seconds", "per_context_token_seconds")
    FIXED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PER_CONTEXT_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    fixed_seconds: float
    per_token_seconds: float
    per_context_token_seconds: float
    def __init__(self, fixed_seconds: _Optional[float] = ..., per_token_seconds: _Optional[float] = ..., per_context_token_seconds: _Optional[float] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("plan", "in_advance")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    IN_ADVANCE_FIELD_NUMBER: _ClassVar[int]
    plan: StagePlan
    in_advance: bool
    def __init__(self, plan: _Optional[_Union[StagePlan, _Mapping]] = ..., in_advance: _Optional[bool] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("tp_rank", "loaded_bytes", "total_bytes")
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    tp_rank: int
    loaded_bytes: int
    total_bytes: int
    def __init__(self, tp_rank: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class RankReport(_message.Message):
    __slots__ = ("tp_rank", "weight_bytes", "kv_block_bytes", "possible_blocks", "num_blocks", "fingerprint_digest", "boundary")
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    POSSIBLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    tp_rank: int
    weight_bytes: int
    kv_block_bytes: int
    possible_blocks: int
    num_blocks: int
    fingerprint_digest: str
    boundary: _topology_pb2.BoundarySchema
    def __init__(self, tp_rank: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_block_bytes: _Optional[int] = ..., possible_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., fingerprint_digest: _Optional[str] = ..., boundary: _Optional[_Union[_topology_pb2.BoundarySchema, _Mapping]] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("progress", "report")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    progress: LoadProgress
    report: RankReport
    def __init__(self, progress: _Optional[_Union[LoadProgress, _Mapping]] = ..., report: _Optional[_Union[RankReport, _Mapping]] = ...) -> None: ...

class ExecuteRequest(_message.Message):
    __slots__ = ("step", "further_steps")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FURTHER_STEPS_FIELD_NUMBER: _ClassVar[int]
    step: _step_pb2.Step
    further_steps: _containers.RepeatedCompositeFieldContainer[_step_pb2.Step]
    def __init__(self, step: _Optional[_Union[_step_pb2.Step, _Mapping]] = ..., further_steps: _Optional[_Iterable[_Union[_step_pb2.Step, _Mapping]]] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("result", "error")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    result: _step_pb2.StepResult
    error: _step_pb2.StageError
    def __init__(self, result: _Optional[_Union[_step_pb2.StepResult, _Mapping]] = ..., error: _Optional[_Union[_step_pb2.StageError, _Mapping]] = ...) -> None: ...

class DeviceMemory(_message.Message):
    __slots__ = ("free_bytes", "total_bytes")
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    free_bytes: int
    total_bytes: int
    def __init__(self, free_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("tp_rank", "device", "pid", "state", "memory_peak_bytes", "memory_at_start", "phase", "phase_seconds", "started")
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_AT_START_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    tp_rank: int
    device: str
    pid: int
    state: ComponentState
    memory_peak_bytes: int
    memory_at_start: DeviceMemory
    phase: RankPhase
    phase_seconds: float
    started: bool
    def __init__(self, tp_rank: _Optional[int] = ..., device: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[_Union[ComponentState, str]] = ..., memory_peak_bytes: _Optional[int] = ..., memory_at_start: _Optional[_Union[DeviceMemory, _Mapping]] = ..., phase: _Optional[_Union[RankPhase, str]] = ..., phase_seconds: _Optional[float] = ..., started: _Optional[bool] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("state", "epoch", "last_step_id", "ranks", "error", "holds")
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    state: ComponentState
    epoch: int
    last_step_id: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    error: _step_pb2.StageError
    holds: _topology_pb2.Placement
    def __init__(self, state: _Optional[_Union[ComponentState, str]] = ..., epoch: _Optional[int] = ..., last_step_id: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., error: _Optional[_Union[_step_pb2.StageError, _Mapping]] = ..., holds: _Optional[_Union[_topology_pb2.Placement, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_seconds", "head_leaves")
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HEAD_LEAVES_FIELD_NUMBER: _ClassVar[int]
    timeout_seconds: float
    head_leaves: bool
    def __init__(self, timeout_seconds: _Optional[float] = ..., head_leaves: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
