from stagemesh.v1 import stage_worker_pb2 as _stage_worker_pb2
from stagemesh.v1 import topology_pb2 as _topology_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("node", "node_rank", "address", "pid", "wanted", "fingerprint", "device", "num_devices", "last_epoch", "standby", "took_over")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICES_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    TOOK_OVER_FIELD_NUMBER: _ClassVar[int]
    node: str
    node_rank: int
    address: str
    pid: int
    wanted: _topology_pb2.Placement
    fingerprint: _topology_pb2.Fingerprint
    device: str
    num_devices: int
    last_epoch: int
    standby: bool
    took_over: bool
    def __init__(self, node: _Optional[str] = ..., node_rank: _Optional[int] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., wanted: _Optional[_Union[_topology_pb2.Placement, _Mapping]] = ..., fingerprint: _Optional[_Union[_topology_pb2.Fingerprint, _Mapping]] = ..., device: _Optional[str] = ..., num_devices: _Optional[int] = ..., last_epoch: _Optional[int] = ..., standby: _Optional[bool] = ..., took_over: _Optional[bool] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("worker_id", "topology", "placement", "heartbeat_interval_seconds", "head_timeout_seconds", "standby")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HEAD_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    topology: _topology_pb2.Topology
    placement: _topology_pb2.Placement
    heartbeat_interval_seconds: float
    head_timeout_seconds: float
    standby: bool
    def __init__(self, worker_id: _Optional[str] = ..., topology: _Optional[_Union[_topology_pb2.Topology, _Mapping]] = ..., placement: _Optional[_Union[_topology_pb2.Placement, _Mapping]] = ..., heartbeat_interval_seconds: _Optional[float] = ..., head_timeout_seconds: _Optional[float] = ..., standby: _Optional[bool] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker_id", "status")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    status: _stage_worker_pb2.StatusResponse
    def __init__(self, worker_id: _Optional[str] = ..., status: _Optional[_Union[_stage_worker_pb2.StatusResponse, _Mapping]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("leave", "leave_reason", "other_head", "place_lost_epoch")
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_REASON_FIELD_NUMBER: _ClassVar[int]
    OTHER_HEAD_FIELD_NUMBER: _ClassVar[int]
    PLACE_LOST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    leave: bool
    leave_reason: str
    other_head: bool
    place_lost_epoch: int
    def __init__(self, leave: _Optional[bool] = ..., leave_reason: _Optional[str] = ..., other_head: _Optional[bool] = ..., place_lost_epoch: _Optional[int] = ...) -> None: ...

class DiagnoseRequest(_message.Message):
    __slots__ = ("node", "node_rank", "hash_weights")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    HASH_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    node: str
    node_rank: int
    hash_weights: bool
    def __init__(self, node: _Optional[str] = ..., node_rank: _Optional[int] = ..., hash_weights: _Optional[bool] = ...) -> None: ...

class DiagnoseResponse(_message.Message):
    __slots__ = ("node", "is_doctor", "topology", "fingerprint", "versions", "device", "members", "missing", "not_ready_reason", "progress", "content_hash")
    NODE_FIELD_NUMBER: _ClassVar[int]
    IS_DOCTOR_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_REASON_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    node: str
    is_doctor: bool
    topology: _topology_pb2.Topology
    fingerprint: _topology_pb2.Fingerprint
    versions: _containers.RepeatedCompositeFieldContainer[_topology_pb2.FingerprintField]
    device: str
    members: _containers.RepeatedCompositeFieldContainer[MemberReport]
    missing: _containers.RepeatedScalarFieldContainer[str]
    not_ready_reason: str
    progress: _containers.RepeatedCompositeFieldContainer[StageProgress]
    content_hash: ContentHash
    def __init__(self, node: _Optional[str] = ..., is_doctor: _Optional[bool] = ..., topology: _Optional[_Union[_topology_pb2.Topology, _Mapping]] = ..., fingerprint: _Optional[_Union[_topology_pb2.Fingerprint, _Mapping]] = ..., versions: _Optional[_Iterable[_Union[_topology_pb2.FingerprintField, _Mapping]]] = ..., device: _Optional[str] = ..., members: _Optional[_Iterable[_Union[MemberReport, _Mapping]]] = ..., missing: _Optional[_Iterable[str]] = ..., not_ready_reason: _Optional[str] = ..., progress: _Optional[_Iterable[_Union[StageProgress, _Mapping]]] = ..., content_hash: _Optional[_Union[ContentHash, _Mapping]] = ...) -> None: ...

class ContentHash(_message.Message):
    __slots__ = ("hashed_bytes", "total_bytes", "files", "error")
    HASHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    hashed_bytes: int
    total_bytes: int
    files: _containers.RepeatedCompositeFieldContainer[FileHash]
    error: str
    def __init__(self, hashed_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., files: _Optional[_Iterable[_Union[FileHash, _Mapping]]] = ..., error: _Optional[str] = ...) -> None: ...

class FileHash(_message.Message):
    __slots__ = ("name", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    sha256: str
    def __init__(self, name: _Optional[str] = ..., sha256: _Optional[str] = ...) -> None: ...

class MemberReport(_message.Message):
    __slots__ = ("node", "node_rank", "address", "pid", "placement", "silent_seconds", "status", "round_trip_seconds")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    node: str
    node_rank: int
    address: str
    pid: int
    placement: _topology_pb2.Placement
    silent_seconds: float
    status: _stage_worker_pb2.StatusResponse
    round_trip_seconds: float
    def __init__(self, node: _Optional[str] = ..., node_rank: _Optional[int] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., placement: _Optional[_Union[_topology_pb2.Placement, _Mapping]] = ..., silent_seconds: _Optional[float] = ..., status: _Optional[_Union[_stage_worker_pb2.StatusResponse, _Mapping]] = ..., round_trip_seconds: _Optional[float] = ...) -> None: ...

class StageProgress(_message.Message):
    __slots__ = ("dp_rank", "pp_rank", "sent_step_id", "done_step_id", "silent_seconds")
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    SENT_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    DONE_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    dp_rank: int
    pp_rank: int
    sent_step_id: int
    done_step_id: int
    silent_seconds: float
    def __init__(self, dp_rank: _Optional[int] = ..., pp_rank: _Optional[int] = ..., sent_step_id: _Optional[int] = ..., done_step_id: _Optional[int] = ..., silent_seconds: _Optional[float] = ...) -> None: ...

class EchoRequest(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...

class EchoResponse(_message.Message):
    __slots__ = ("payload", "clock_seconds")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CLOCK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    clock_seconds: float
    def __init__(self, payload: _Optional[bytes] = ..., clock_seconds: _Optional[float] = ...) -> None: ...
