"""What the engine needs of a pipeline of stages.

The real one (`gateway.pipeline`) speaks gRPC to the stage workers; tests use
a simulated one.
"""

from __future__ import annotations

from typing import Protocol

from stagemesh.v1 import step_pb2


class Pipeline(Protocol):
    """One epoch of stages that apply steps in order."""

    @property
    def num_stages(self) -> int:
        """Pipeline-parallel size."""
        ...

    @property
    def epoch(self) -> int:
        """Epoch that every step must carry."""
        ...

    def send(self, step: step_pb2.Step) -> None:
        """Hands a step to every stage. Never blocks: the scheduler bounds the steps in flight.

        Raises `StageFailed` when the pipeline is known to be broken.
        """
        ...

    async def next_result(self) -> step_pb2.StepResult:
        """The last stage's next result, in step order. Waits for ever while nothing is in
        flight; a step that is overdue is the pipeline's to notice.

        Raises `StageFailed` with the first cause.
        """
        ...
