"""How many steps can be in flight, and what has to have room for them on either side."""

from __future__ import annotations

from gateway.engine.scheduled_step import SchedulerLimits
from gateway.pipeline.mesh_pipeline import MAX_UNREAD_RESULTS, MAX_UNSENT_STEPS
from services.ranges import MAX_BATCH_DEPTH
from stage_worker.ipc import MAX_STEPS_OF_A_REQUEST
from stage_worker.references import KEPT_STEPS

MAX_LAYERS = 200
"""Of any model there is, and some more. A stage has one at least."""


def test_what_holds_steps_has_room_for_all_that_are_in_flight() -> None:
    limits = SchedulerLimits(
        num_blocks=1,
        block_size=1,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        num_stages=MAX_LAYERS,
        async_batch_depth=MAX_BATCH_DEPTH,
    )
    most_in_flight = limits.num_batches + 1
    assert most_in_flight <= MAX_UNSENT_STEPS
    assert most_in_flight <= MAX_UNREAD_RESULTS
    # A stage may be given all of them together, and a reference may go back as far.
    assert most_in_flight <= MAX_STEPS_OF_A_REQUEST
    assert most_in_flight <= KEPT_STEPS
