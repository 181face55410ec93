from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BoundaryLayout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BOUNDARY_LAYOUT_UNSPECIFIED: _ClassVar[BoundaryLayout]
    BOUNDARY_LAYOUT_REPLICATED: _ClassVar[BoundaryLayout]
    BOUNDARY_LAYOUT_SHARDED: _ClassVar[BoundaryLayout]
BOUNDARY_LAYOUT_UNSPECIFIED: BoundaryLayout
BOUNDARY_LAYOUT_REPLICATED: BoundaryLayout
BOUNDARY_LAYOUT_SHARDED: BoundaryLayout

class Topology(_message.Message):
    __slots__ = ("dp_size", "tp_size", "pp_size", "pp_layer_partition")
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_LAYER_PARTITION_FIELD_NUMBER: _ClassVar[int]
    dp_size: int
    tp_size: int
    pp_size: int
    pp_layer_partition: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dp_size: _Optional[int] = ..., tp_size: _Optional[int] = ..., pp_size: _Optional[int] = ..., pp_layer_partition: _Optional[_Iterable[int]] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("digest", "fields")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    fields: _containers.RepeatedCompositeFieldContainer[FingerprintField]
    def __init__(self, digest: _Optional[str] = ..., fields: _Optional[_Iterable[_Union[FingerprintField, _Mapping]]] = ...) -> None: ...

class FingerprintField(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("dp_rank", "pp_rank", "tp_ranks", "device_indices", "layer_start", "layer_end")
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_RANKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_INDICES_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    dp_rank: int
    pp_rank: int
    tp_ranks: _containers.RepeatedScalarFieldContainer[int]
    device_indices: _containers.RepeatedScalarFieldContainer[int]
    layer_start: int
    layer_end: int
    def __init__(self, dp_rank: _Optional[int] = ..., pp_rank: _Optional[int] = ..., tp_ranks: _Optional[_Iterable[int]] = ..., device_indices: _Optional[_Iterable[int]] = ..., layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ...) -> None: ...

class BoundaryTensor(_message.Message):
    __slots__ = ("name", "trailing_shape", "dtype", "layout")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRAILING_SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    trailing_shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    layout: BoundaryLayout
    def __init__(self, name: _Optional[str] = ..., trailing_shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., layout: _Optional[_Union[BoundaryLayout, str]] = ...) -> None: ...

class BoundarySchema(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[BoundaryTensor]
    def __init__(self, tensors: _Optional[_Iterable[_Union[BoundaryTensor, _Mapping]]] = ...) -> None: ...
