from stagemesh.v1 import stage_worker_pb2 as _stage_worker_pb2
from stagemesh.v1 import topology_pb2 as _topology_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("node", "node_rank", "address", "pid", "wanted", "fingerprint", "device", "num_devices")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICES_FIELD_NUMBER: _ClassVar[int]
    node: str
    node_rank: int
    address: str
    pid: int
    wanted: _topology_pb2.Placement
    fingerprint: _topology_pb2.Fingerprint
    device: str
    num_devices: int
    def __init__(self, node: _Optional[str] = ..., node_rank: _Optional[int] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., wanted: _Optional[_Union[_topology_pb2.Placement, _Mapping]] = ..., fingerprint: _Optional[_Union[_topology_pb2.Fingerprint, _Mapping]] = ..., device: _Optional[str] = ..., num_devices: _Optional[int] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("worker_id", "topology", "placement", "heartbeat_interval_seconds", "head_timeout_seconds")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HEAD_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    topology: _topology_pb2.Topology
    placement: _topology_pb2.Placement
    heartbeat_interval_seconds: float
    head_timeout_seconds: float
    def __init__(self, worker_id: _Optional[str] = ..., topology: _Optional[_Union[_topology_pb2.Topology, _Mapping]] = ..., placement: _Optional[_Union[_topology_pb2.Placement, _Mapping]] = ..., heartbeat_interval_seconds: _Optional[float] = ..., head_timeout_seconds: _Optional[float] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker_id", "status")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    status: _stage_worker_pb2.StatusResponse
    def __init__(self, worker_id: _Optional[str] = ..., status: _Optional[_Union[_stage_worker_pb2.StatusResponse, _Mapping]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("leave", "leave_reason")
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_REASON_FIELD_NUMBER: _ClassVar[int]
    leave: bool
    leave_reason: str
    def __init__(self, leave: _Optional[bool] = ..., leave_reason: _Optional[str] = ...) -> None: ...
