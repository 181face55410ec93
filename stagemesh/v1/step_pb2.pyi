from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "num_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    num_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., num_logprobs: _Optional[int] = ...) -> None: ...

class TokenReference(_message.Message):
    __slots__ = ("step_id", "row", "index")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    row: int
    index: int
    def __init__(self, step_id: _Optional[int] = ..., row: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class QueryReference(_message.Message):
    __slots__ = ("query_index", "reference")
    QUERY_INDEX_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    query_index: int
    reference: TokenReference
    def __init__(self, query_index: _Optional[int] = ..., reference: _Optional[_Union[TokenReference, _Mapping]] = ...) -> None: ...

class SlotStart(_message.Message):
    __slots__ = ("slot", "choice_index", "sampling", "prompt_length", "history_token_ids")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    HISTORY_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    choice_index: int
    sampling: SamplingParams
    prompt_length: int
    history_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slot: _Optional[int] = ..., choice_index: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., prompt_length: _Optional[int] = ..., history_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepRow(_message.Message):
    __slots__ = ("slot", "position", "token_ids", "references", "new_block_ids", "num_sampled")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    slot: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    references: _containers.RepeatedCompositeFieldContainer[QueryReference]
    new_block_ids: _containers.RepeatedScalarFieldContainer[int]
    num_sampled: int
    def __init__(self, slot: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., references: _Optional[_Iterable[_Union[QueryReference, _Mapping]]] = ..., new_block_ids: _Optional[_Iterable[int]] = ..., num_sampled: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("epoch", "step_id", "released_slots", "starts", "rows", "returns_tokens")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    RETURNS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step_id: int
    released_slots: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedCompositeFieldContainer[SlotStart]
    rows: _containers.RepeatedCompositeFieldContainer[StepRow]
    returns_tokens: bool
    def __init__(self, epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., released_slots: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[_Union[SlotStart, _Mapping]]] = ..., rows: _Optional[_Iterable[_Union[StepRow, _Mapping]]] = ..., returns_tokens: _Optional[bool] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class ResultRow(_message.Message):
    __slots__ = ("row", "token_ids", "logprobs", "draft_token_ids")
    ROW_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    row: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, row: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., draft_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StageClock(_message.Message):
    __slots__ = ("control_wait_ns", "receive_ns", "compute_ns", "send_ns", "compute_start_ns", "compute_end_ns", "end_ns")
    CONTROL_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    SEND_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_START_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_END_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    control_wait_ns: int
    receive_ns: int
    compute_ns: int
    send_ns: int
    compute_start_ns: int
    compute_end_ns: int
    end_ns: int
    def __init__(self, control_wait_ns: _Optional[int] = ..., receive_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., send_ns: _Optional[int] = ..., compute_start_ns: _Optional[int] = ..., compute_end_ns: _Optional[int] = ..., end_ns: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("epoch", "step_id", "rows", "clock", "earlier_clocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    EARLIER_CLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step_id: int
    rows: _containers.RepeatedCompositeFieldContainer[ResultRow]
    clock: StageClock
    earlier_clocks: _containers.RepeatedCompositeFieldContainer[StageClock]
    def __init__(self, epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[ResultRow, _Mapping]]] = ..., clock: _Optional[_Union[StageClock, _Mapping]] = ..., earlier_clocks: _Optional[_Iterable[_Union[StageClock, _Mapping]]] = ...) -> None: ...

class StageError(_message.Message):
    __slots__ = ("reason", "message", "pp_rank", "tp_rank", "epoch", "step_id")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    pp_rank: int
    tp_rank: int
    epoch: int
    step_id: int
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., pp_rank: _Optional[int] = ..., tp_rank: _Optional[int] = ..., epoch: _Optional[int] = ..., step_id: _Optional[int] = ...) -> None: ...
