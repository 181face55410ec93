from stagemesh.v1 import stage_worker_pb2 as _stage_worker_pb2
from stagemesh.v1 import step_pb2 as _step_pb2
from stagemesh.v1 import topology_pb2 as _topology_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankCommand(_message.Message):
    __slots__ = ("step", "open_store", "form_group", "load", "stop", "leave_group", "take_place")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OPEN_STORE_FIELD_NUMBER: _ClassVar[int]
    FORM_GROUP_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LEAVE_GROUP_FIELD_NUMBER: _ClassVar[int]
    TAKE_PLACE_FIELD_NUMBER: _ClassVar[int]
    step: _step_pb2.Step
    open_store: _stage_worker_pb2.OpenStoreRequest
    form_group: _stage_worker_pb2.FormGroupRequest
    load: _stage_worker_pb2.StagePlan
    stop: RankStop
    leave_group: LeaveGroup
    take_place: TakePlace
    def __init__(self, step: _Optional[_Union[_step_pb2.Step, _Mapping]] = ..., open_store: _Optional[_Union[_stage_worker_pb2.OpenStoreRequest, _Mapping]] = ..., form_group: _Optional[_Union[_stage_worker_pb2.FormGroupRequest, _Mapping]] = ..., load: _Optional[_Union[_stage_worker_pb2.StagePlan, _Mapping]] = ..., stop: _Optional[_Union[RankStop, _Mapping]] = ..., leave_group: _Optional[_Union[LeaveGroup, _Mapping]] = ..., take_place: _Optional[_Union[TakePlace, _Mapping]] = ...) -> None: ...

class TakePlace(_message.Message):
    __slots__ = ("pp_rank", "tp_rank")
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    pp_rank: int
    tp_rank: int
    def __init__(self, pp_rank: _Optional[int] = ..., tp_rank: _Optional[int] = ...) -> None: ...

class PlaceTaken(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankStop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveGroup(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GroupLeft(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankHello(_message.Message):
    __slots__ = ("pid", "device", "fingerprint", "memory")
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    pid: int
    device: str
    fingerprint: _topology_pb2.Fingerprint
    memory: _stage_worker_pb2.DeviceMemory
    def __init__(self, pid: _Optional[int] = ..., device: _Optional[str] = ..., fingerprint: _Optional[_Union[_topology_pb2.Fingerprint, _Mapping]] = ..., memory: _Optional[_Union[_stage_worker_pb2.DeviceMemory, _Mapping]] = ...) -> None: ...

class RankAlive(_message.Message):
    __slots__ = ("last_step_id", "memory_peak_bytes", "phase", "phase_seconds")
    LAST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    last_step_id: int
    memory_peak_bytes: int
    phase: _stage_worker_pb2.RankPhase
    phase_seconds: float
    def __init__(self, last_step_id: _Optional[int] = ..., memory_peak_bytes: _Optional[int] = ..., phase: _Optional[_Union[_stage_worker_pb2.RankPhase, str]] = ..., phase_seconds: _Optional[float] = ...) -> None: ...

class RankEvent(_message.Message):
    __slots__ = ("hello", "store_opened", "group_formed", "load_progress", "loaded", "result", "error", "alive", "group_left", "place_taken")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STORE_OPENED_FIELD_NUMBER: _ClassVar[int]
    GROUP_FORMED_FIELD_NUMBER: _ClassVar[int]
    LOAD_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    GROUP_LEFT_FIELD_NUMBER: _ClassVar[int]
    PLACE_TAKEN_FIELD_NUMBER: _ClassVar[int]
    hello: RankHello
    store_opened: _stage_worker_pb2.OpenStoreResponse
    group_formed: _stage_worker_pb2.FormGroupResponse
    load_progress: _stage_worker_pb2.LoadProgress
    loaded: _stage_worker_pb2.RankReport
    result: _step_pb2.StepResult
    error: _step_pb2.StageError
    alive: RankAlive
    group_left: GroupLeft
    place_taken: PlaceTaken
    def __init__(self, hello: _Optional[_Union[RankHello, _Mapping]] = ..., store_opened: _Optional[_Union[_stage_worker_pb2.OpenStoreResponse, _Mapping]] = ..., group_formed: _Optional[_Union[_stage_worker_pb2.FormGroupResponse, _Mapping]] = ..., load_progress: _Optional[_Union[_stage_worker_pb2.LoadProgress, _Mapping]] = ..., loaded: _Optional[_Union[_stage_worker_pb2.RankReport, _Mapping]] = ..., result: _Optional[_Union[_step_pb2.StepResult, _Mapping]] = ..., error: _Optional[_Union[_step_pb2.StageError, _Mapping]] = ..., alive: _Optional[_Union[RankAlive, _Mapping]] = ..., group_left: _Optional[_Union[GroupLeft, _Mapping]] = ..., place_taken: _Optional[_Union[PlaceTaken, _Mapping]] = ...) -> None: ...
