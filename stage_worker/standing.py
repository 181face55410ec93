"""Where a stage worker stands in its mesh: at a place, or a spare that may be given one.

A place is given and lost by epoch, so that an order that comes late changes nothing: a
worker whose place was taken over holds it no more, whatever it still hears.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.errors import ConfigError, InvalidRequest, PipelineUnavailable
from services.topology.wire import MAX_SIZE
from stage_worker.rank_arguments import RankPlace
from stagemesh.v1 import stage_worker_pb2, topology_pb2

_SEVERITY = (
    stage_worker_pb2.COMPONENT_STATE_STANDBY,
    stage_worker_pb2.COMPONENT_STATE_READY,
    stage_worker_pb2.COMPONENT_STATE_LOADING,
    stage_worker_pb2.COMPONENT_STATE_STARTING,
    stage_worker_pb2.COMPONENT_STATE_DRAINING,
    stage_worker_pb2.COMPONENT_STATE_FAILED,
)
"""From best to worst: a worker is in the state of its worst rank."""


class Standing:
    """The place of one worker, and the one whose weights its ranks hold."""

    def __init__(self) -> None:
        self.placement: topology_pb2.Placement | None = None
        """None for a spare, and before the join is answered."""
        self.is_spare = False
        self.took_over = False
        """Whether it was a spare before it had its place."""
        self._given_epoch = 0
        self._lost_epoch = 0
        self._held: topology_pb2.Placement | None = None

    @property
    def last_epoch(self) -> int:
        """The last one in which a place was given to this worker or lost by it; 0 before the
        first. Its groups need not have been formed."""
        return max(self._given_epoch, self._lost_epoch)

    def joined(self, placement: topology_pb2.Placement, *, standby: bool) -> None:
        """The head has answered a join."""
        if standby:
            self._lost_epoch = max(self._lost_epoch, self._given_epoch)
        self.is_spare = standby
        self.placement = None if standby else placement

    def take(self, epoch: int, placement: topology_pb2.Placement, num_ranks: int) -> None:
        """The head gives the worker a place from an epoch on. Raises `InvalidRequest` for one that
        its ranks cannot fill, `ConfigError` for one that it has lost or changed since."""
        check_placement(placement, num_ranks)
        if epoch <= self._lost_epoch:
            raise ConfigError(
                f"the place was given in epoch {epoch}, and another worker has taken it over in "
                f"epoch {self._lost_epoch} or later"
            )
        if epoch < self._given_epoch:
            raise ConfigError(
                f"the place was given in epoch {epoch}, and this worker was given one in epoch "
                f"{self._given_epoch}"
            )
        self.took_over = self.took_over or self.is_spare
        self.placement, self.is_spare, self._given_epoch = placement, False, epoch

    def lose(self, epoch: int) -> bool:
        """Another worker has taken over what this one was given in `epoch` or before. Returns
        whether that is news."""
        known = self.is_spare or epoch < self._given_epoch
        self._lost_epoch = max(self._lost_epoch, epoch)
        if not known:
            self.placement, self.is_spare = None, True
        return not known

    def check_spare(self) -> None:
        """Raises `PipelineUnavailable` where the worker has a place, and needs what it holds."""
        if not self.is_spare:
            raise PipelineUnavailable("this stage worker is no spare: it loads for its own place")

    def check_own(self, placement: topology_pb2.Placement) -> None:
        """Raises `ConfigError` for a place that is not the worker's own."""
        own = self.placement
        if own is None:
            return
        if own.dp_rank != placement.dp_rank or not same_weights(own, placement):
            raise ConfigError(
                f"a plan for {_words(placement)} has come to the stage worker of {_words(own)}; "
                "it loads for its own place",
                param="placement",
            )

    def load(self, placement: topology_pb2.Placement) -> None:
        """The ranks begin to load for a place; what they hold of another they drop."""
        if self._held is not None and not same_weights(self._held, placement):
            self._held = None

    def loaded(self, placement: topology_pb2.Placement) -> None:
        """All ranks hold the weights of a place."""
        self._held = placement

    def status(
        self,
        ranks: Sequence[stage_worker_pb2.RankStatus],
        *,
        all_hold: bool,
        in_group: bool,
        leaving: bool,
    ) -> stage_worker_pb2.StatusResponse:
        """State and held place. `all_hold`: no rank has been replaced since it loaded;
        `in_group`: one of them is in a group, as far as is known;
        `leaving`: the worker knows that it leaves before its ranks do."""
        # A rank that has failed and lives could not load what it was told to. It can for another
        # place, or a little later.
        idle = (
            stage_worker_pb2.COMPONENT_STATE_STARTING,
            stage_worker_pb2.COMPONENT_STATE_READY,
            stage_worker_pb2.COMPONENT_STATE_FAILED,
        )
        states = [
            stage_worker_pb2.COMPONENT_STATE_STANDBY
            if self.is_spare and rank.started and rank.state in idle
            else rank.state
            for rank in ranks
        ]
        if self.is_spare and in_group:
            states.append(stage_worker_pb2.COMPONENT_STATE_STARTING)
        if leaving:
            states.append(stage_worker_pb2.COMPONENT_STATE_DRAINING)
        worst = max(states, key=_SEVERITY.index, default=stage_worker_pb2.COMPONENT_STATE_STARTING)
        holds = self._held if ranks and all_hold else None
        return stage_worker_pb2.StatusResponse(state=worst, ranks=ranks, holds=holds)


def _words(placement: topology_pb2.Placement) -> str:
    return (
        f"stage {placement.pp_rank} of replica {placement.dp_rank} (layers {placement.layer_start} "
        f"to {placement.layer_end - 1}, TP ranks {', '.join(map(str, placement.tp_ranks))})"
    )


def check_placement(placement: topology_pb2.Placement, num_ranks: int) -> None:
    """Raises `InvalidRequest` for a place that a worker of so many ranks cannot fill."""
    tp_ranks = placement.tp_ranks
    if len(tp_ranks) != num_ranks or max((placement.pp_rank, *tp_ranks)) >= MAX_SIZE:
        raise InvalidRequest(
            f"placement has stage {placement.pp_rank} and TP ranks "
            f"{', '.join(map(str, tp_ranks)) or 'none'}, and this worker runs {num_ranks} "
            f"ranks; stages and ranks below {MAX_SIZE} are believed",
            param="placement",
        )


def same_weights(one: topology_pb2.Placement, other: topology_pb2.Placement) -> bool:
    """Whether two places have the same weights: replicas are alike, and devices do not matter."""
    return (one.pp_rank, list(one.tp_ranks), one.layer_start, one.layer_end) == (
        other.pp_rank,
        list(other.tp_ranks),
        other.layer_start,
        other.layer_end,
    )


def rank_places(placement: topology_pb2.Placement) -> list[RankPlace]:
    """Where each rank of a worker at this place stands."""
    return [RankPlace(placement.pp_rank, tp_rank) for tp_rank in placement.tp_ranks]
