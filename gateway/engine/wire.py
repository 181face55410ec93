"""From the engine's facts to the messages of step.proto, and back."""

from __future__ import annotations

from gateway.engine.scheduled_step import ScheduledStep
from gateway.engine.sequence import Sequence, SequenceStatus
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


def sampled_by(
    scheduled: ScheduledStep, result: step_pb2.StepResult
) -> dict[int, tuple[tuple[int, ...], tuple[TokenLogprob, ...]]]:
    """Tokens and log probabilities that a step has brought, by the index of their row: of every
    row that samples, and whose sequence has not ended since.

    Raises `StageFailed` where a row has none.
    """
    result_rows = {row.row: row for row in result.rows}
    sampled = {}
    for index, (sequence, num_sampled) in enumerate(scheduled.rows):
        if num_sampled == 0 or sequence.status is SequenceStatus.FINISHED:
            continue
        row = result_rows.get(index)
        if row is None or not row.token_ids:
            raise StageFailed(f"step {result.step_id} brought no token for its row {index}")
        asked = sequence.sampling.num_logprobs is not None
        logprobs = logprobs_from_proto(row, len(row.token_ids)) if asked else ()
        sampled[index] = (tuple(row.token_ids), logprobs)
    return sampled
