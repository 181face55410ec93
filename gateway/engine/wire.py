"""From the engine's facts to the messages of step.proto, and back."""

from __future__ import annotations

from gateway.engine.sequence import Sequence
from gateway.engine.types import SamplingParams, TokenLogprob
from services.errors import StageFailed
from stagemesh.v1 import step_pb2


def sampling_to_proto(sampling: SamplingParams) -> step_pb2.SamplingParams:
    """Every field is set, so that a stage needs no defaults of its own."""
    return step_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        num_logprobs=sampling.num_logprobs,
    )


def slot_start(sequence: Sequence, slot: int) -> step_pb2.SlotStart:
    """The message that lets `sequence` enter `slot`, with its log where penalties need it."""
    return step_pb2.SlotStart(
        slot=slot,
        choice_index=sequence.choice_index,
        sampling=sampling_to_proto(sequence.sampling),
        prompt_length=sequence.prompt_length,
        history_token_ids=sequence.token_ids if sequence.sampling.needs_history else (),
    )


def logprobs_from_proto(row: step_pb2.ResultRow, num_tokens: int) -> tuple[TokenLogprob, ...]:
    """Log probabilities of the row's first `num_tokens` tokens; empty where none were asked for.

    Raises `StageFailed` for a row that is not whole.
    """
    if not row.logprobs:
        return ()
    try:
        return tuple(
            TokenLogprob(
                token_id=token_id,
                logprob=logprobs.logprob,
                top=tuple(zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)),
            )
            for token_id, logprobs in zip(
                row.token_ids[:num_tokens], row.logprobs[:num_tokens], strict=False
            )
        )
    except ValueError:
        raise StageFailed(
            f"row {row.row} of a result has not one log probability for each alternative"
        ) from None
