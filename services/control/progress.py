"""How far each stage is, and on what it waits: facts and words. Pure.

Every stage is given every step, later stages some of them later, and answers them in order. The
step that the last stage is to do next is always with all of them. So what a stage waits for follows
from who was given and has answered what: of those that have work, the one that is furthest behind
holds the step, and those after it wait for its activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# What may be where the ranks have not been asked.
_UNKNOWN_FIRST = "it computes, or does not run"
_UNKNOWN = "it computes, does not run, or they do not arrive"


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far one stage of one replica is."""

    dp_rank: int
    pp_rank: int
    sent_step_id: int
    """Last step that it was given, which earlier stages may be past; 0 before the first."""
    done_step_id: int
    """Last step that it has answered; 0 before the first."""
    silent_seconds: float
    """Since it answered, or since it was given work after it had none."""

    @property
    def is_idle(self) -> bool:
        """Whether it has answered all that it was given."""
        return self.done_step_id >= self.sent_step_id

    @property
    def stalled_seconds(self) -> float:
        """For how long it has had work and answered nothing; 0 while it has none."""
        return 0.0 if self.is_idle else self.silent_seconds


class ProgressTable:
    """Who has answered what in one replica. No clock of its own: callers pass the time."""

    def __init__(self, dp_rank: int, pp_ranks: Iterable[int]) -> None:
        self._dp_rank = dp_rank
        self._done = dict.fromkeys(sorted(pp_ranks), 0)
        self._sent = dict.fromkeys(self._done, 0)
        self._moved_at = dict.fromkeys(self._done, 0.0)

    def given(self, pp_rank: int, step_id: int, now: float) -> None:
        """A stage has been given all steps up to this one."""
        if self._done[pp_rank] >= self._sent[pp_rank]:  # It had nothing to do until now.
            self._moved_at[pp_rank] = now
        self._sent[pp_rank] = step_id

    def answered(self, pp_rank: int, step_id: int, now: float) -> None:
        """A stage has answered a step."""
        self._done[pp_rank] = step_id
        self._moved_at[pp_rank] = now

    def open_steps(self, pp_rank: int) -> range:
        """The steps that a stage has been given and has not answered."""
        return range(self._done[pp_rank] + 1, self._sent[pp_rank] + 1)

    def forgive(self, now: float) -> None:
        """Counts every stage as having just moved: it was this side that did not listen."""
        for pp_rank in self._moved_at:
            self._moved_at[pp_rank] = max(self._moved_at[pp_rank], now)

    def held_seconds(self, pp_rank: int, now: float) -> float:
        """For how long at least a stage has had all that its next step needs of those before it,
        and has not answered: they have answered nothing since."""
        moved = (at for rank, at in self._moved_at.items() if rank <= pp_rank)
        return now - max(moved)

    def stages(self, now: float) -> tuple[StageProgress, ...]:
        """Every stage, in stage order."""
        return tuple(
            StageProgress(self._dp_rank, pp_rank, sent, self._done[pp_rank], now - moved_at)
            for (pp_rank, sent), moved_at in zip(
                self._sent.items(), self._moved_at.values(), strict=True
            )
        )


def furthest_behind(stages: Sequence[StageProgress]) -> StageProgress | None:
    """The stage that holds up its replica: of those with steps to answer, the first that has
    answered least. None where no stage has any. `stages` are those of one replica."""
    working = [stage for stage in stages if not stage.is_idle]
    return min(working, key=lambda stage: (stage.done_step_id, stage.pp_rank), default=None)


def explain_progress(
    stages: Sequence[StageProgress], doing: Mapping[int, str] | None = None
) -> str | None:
    """Who holds a step, for how long, and who waits on whom, on one line; None where no
    stage has steps to answer. `stages` are all stages of one replica; `doing` is what the ranks of
    a stage say that they do, by PP rank, where that is known."""
    holder = furthest_behind(stages)
    if holder is None:
        return None
    by_rank = {stage.pp_rank: stage for stage in stages}
    said = (doing or {}).get(holder.pp_rank)
    words = [f"{_name(holder)} {_silence(holder)}: {_holds(holder, by_rank, said)}"]
    words += [
        f"{_name(stage)} waits for activations of step {stage.done_step_id + 1} from stage "
        f"{stage.pp_rank - 1}"
        for stage in sorted(stages, key=lambda stage: stage.pp_rank)
        if stage.pp_rank > holder.pp_rank and not stage.is_idle
    ]
    return "; ".join(words)


def _name(stage: StageProgress) -> str:
    return f"stage {stage.pp_rank}"


def _silence(stage: StageProgress) -> str:
    return f"has been silent for {stage.silent_seconds:.1f} s"


def _holds(holder: StageProgress, by_rank: dict[int, StageProgress], said: str | None) -> str:
    step_id = holder.done_step_id + 1
    last = "no step yet" if holder.done_step_id == 0 else f"step {holder.done_step_id}"
    holds = f"it has done {last} and holds step {step_id}"
    before = by_rank.get(holder.pp_rank - 1)
    if before is None:
        return f"{holds}, which needs nothing of another stage: {said or _UNKNOWN_FIRST}"
    return f"{holds}, whose activations {_name(before)} has sent: {said or _UNKNOWN}"
