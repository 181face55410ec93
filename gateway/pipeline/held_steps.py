"""Which steps a stage is given when. Later stages need them later, so several go together. Pure.

A message costs the gateway, a stage worker and a rank the same work whatever is in it, and a
stage that is far behind in the pipeline cannot begin a step before those in front of it have
done it. So a stage's steps are held back, until the last stage has done the one that lies
`num_stages + SLACK - pp_rank` before; then all that are held go at once.

That costs no throughput, whatever the stages take. Of the steps between the two, at least
`num_stages + SLACK - pp_rank - 1` have yet to leave the last stage. The step itself, from here
on, needs a message to the stage and `num_stages - pp_rank` stages. Where steps are alike the
slowest stage takes as long for those before it as all these take together, with `SLACK` times its
own time left for the message, and for the rank to prepare the step while its device is busy.

Where steps are not alike that does not hold: a long one that is held behind short ones would
leave the last stage without work. So only steps of decodes wait, while no other is in flight. With
few steps in flight none waits, and the next step that the mesh has to do never does.
"""

from __future__ import annotations

from collections.abc import Iterable

SLACK = 2
"""Steps before the one that a stage could begin: it prepares one while it computes another, and one
is for the time that results and messages take."""


class HeldSteps:
    """What each stage of a pipeline has been given. Steps are numbered from 1, without a gap."""

    def __init__(self, pp_ranks: Iterable[int]) -> None:
        self._given = dict.fromkeys(sorted(pp_ranks), 0)
        """The last step that each stage was given."""
        self._num_stages = len(self._given)
        self._last = 0
        """The last step that there is."""
        self._done = 0
        """The last step that has left the last stage."""
        self._last_urgent = 0
        """The last step that must not wait, nor keep others waiting."""

    def add(self, step_id: int, *, is_alike: bool) -> None:
        """There is another step. `is_alike` says that it takes about as long as others like it."""
        self._last = step_id
        if not is_alike:
            self._last_urgent = step_id

    def done(self, step_id: int) -> None:
        """A step has left the last stage."""
        self._done = step_id

    def given(self, pp_rank: int) -> int:
        """The last step that a stage was given; 0 before the first."""
        return self._given[pp_rank]

    @property
    def given_to_all(self) -> int:
        """The last step that every stage was given; 0 before the first."""
        return min(self._given.values())

    def release(self, pp_rank: int) -> range:
        """The steps that a stage is to be given now, which then count as given."""
        next_step = self._given[pp_rank] + 1
        first_to_wait = self._done + self._num_stages + SLACK - pp_rank + 1
        if next_step >= first_to_wait and self._last_urgent <= self._done:
            return range(0)
        self._given[pp_rank] = self._last
        return range(next_step, self._last + 1)
