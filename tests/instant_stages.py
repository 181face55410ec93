"""A pipeline that answers steps after a fixed time, without computing anything."""

from __future__ import annotations

import asyncio

from stagemesh.v1 import step_pb2

FIRST_TOKEN = 32
NUM_TOKENS = 90
"""Letters of a byte-level vocabulary."""


class InstantStages:
    """Implements `gateway.engine.pipeline.Pipeline`."""

    num_stages = 1
    epoch = 1

    def __init__(self, step_seconds: float, num_logprobs: int = 0) -> None:
        """`num_logprobs` alternatives come with each token, asked for or not."""
        self._step_seconds = step_seconds
        self._alternatives = step_pb2.TokenLogprobs(
            logprob=-1.0, top_token_ids=range(num_logprobs), top_logprobs=[-1.0] * num_logprobs
        )
        self._steps: asyncio.Queue[step_pb2.Step] = asyncio.Queue()

    def send(self, step: step_pb2.Step) -> None:
        self._steps.put_nowait(step)

    async def next_result(self) -> step_pb2.StepResult:
        step = await self._steps.get()
        await asyncio.sleep(self._step_seconds)
        result = step_pb2.StepResult(epoch=self.epoch, step_id=step.step_id)
        for index, row in enumerate(step.rows):
            if row.num_sampled:
                token_id = FIRST_TOKEN + (step.step_id + index) % NUM_TOKENS
                answer = result.rows.add(row=index, token_ids=[token_id])
                if self._alternatives.top_token_ids:
                    answer.logprobs.append(self._alternatives)
        return result
