"""What the gateway does with spare workers: a lost place goes to one at once, one that is named
holds a stage's weights in advance, and all are told when the mesh goes.

Which spare is chosen is `services.control.takeover`'s to decide; how a worker comes from a
spare to a stage is the same as for any other in a new epoch: `ResetRanks`, `FormGroup`, `Load`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from gateway.pipeline.bring_up import stage_plan
from gateway.pipeline.stage_client import StageClient
from services.control.member import Place, Spare, place_of
from services.control.service import ControlService, describe
from services.control.takeover import Readiness, readiness, to_hold
from services.errors import StageFailed, StagemeshError
from services.topology.placement import StagePlacement
from stagemesh.v1 import stage_worker_pb2

log = logging.getLogger("stagemesh.gateway")

HOLD_PAUSE_SECONDS = 10.0
"""Before a spare is asked again for weights that it could not load in advance: what is wrong may
pass, and nobody waits."""
HOLD_STALL_SECONDS = 120.0
"""How long a spare that loads in advance may get no further: others wait for their turn."""
MAX_DEMOTED = 1024
"""Workers that are yet to be told; they hear it with their heartbeat as well."""
STANDBY_STATES = ("ready", "loading", "starting", "silent")


@dataclass(frozen=True, slots=True)
class _Demoted:
    spare: Spare
    replace: bool
    """Its ranks hold a step that does not end."""


class Standby:
    """The spares of one mesh."""

    def __init__(
        self,
        control: ControlService,
        plan: stage_worker_pb2.StagePlan,
        held: Sequence[StagePlacement],
        on_taken_over: Callable[[int], None],
        all_serve: Callable[[], bool],
    ) -> None:
        """`held` are the places whose weights spares hold in advance; `on_taken_over` hears of each
        takeover in a replica. While not `all_serve` spares are left to the replicas."""
        self._control = control
        self._plan = plan
        self._held = tuple(held)
        self._on_taken_over = on_taken_over
        self._all_serve = all_serve
        self._not_before: dict[tuple[str, Place], float] = {}
        """When a spare may load for a place again, where it could not."""
        self._demoted = asyncio.Queue[_Demoted](MAX_DEMOTED)

    async def present(
        self,
        dp_rank: int,
        epoch: int,
        stuck: Collection[str],
        failed: Collection[str],
        on_waiting: Callable[[str], None],
    ) -> None:
        """Waits until every place of a replica is held by a worker that is heard of; spares take
        over from those that are lost or have to start a rank again.

        `epoch` is the last one, `stuck` names workers whose ranks hold a step that does not end,
        `failed` those that could not be brought up in this recovery.
        """
        known: dict[str, Readiness] = {}
        if self._control.membership.spares:
            known = await self._ask(dp_rank, {*stuck, *failed})

        def take_over(known: dict[str, Readiness]) -> None:
            now = asyncio.get_running_loop().time()
            table = self._control.membership
            for member, old in table.take_over(dp_rank, epoch, now, known, failed):
                log.warning("%s was a spare and takes the place over", describe(member))
                self._on_taken_over(dp_rank)
                if old is not None and not self._demoted.full():
                    # Of one that is silent nothing is known: its ranks may have done the step.
                    replace = old.worker_id in stuck and not old.is_silent(now)
                    self._demoted.put_nowait(_Demoted(old, replace))

        take_over(known)
        await self._control.present(dp_rank, on_waiting, lambda: take_over({}))

    async def _ask(self, dp_rank: int, behind: Collection[str]) -> dict[str, Readiness]:
        """How far the workers of a replica are; without those that do not answer in time. Those of
        `behind` are less far than they say."""
        now = asyncio.get_running_loop().time()
        members = [
            member
            for member in self._control.membership.members
            if member.placement.dp_rank == dp_rank and not member.is_silent(now)
        ]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._control.status(member)) for member in members]
        return {
            member.worker_id: Readiness.STARTING
            if member.worker_id in behind
            else readiness(status, member.placement)
            for member, question in zip(members, asked, strict=True)
            if (status := question.result()) is not None
        }

    async def run(self) -> None:
        """Keeps weights held in advance, and tells those who have lost their places; runs until
        cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hold())
            while True:
                tasks.create_task(self._tell(await self._demoted.get()))

    async def _tell(self, demoted: _Demoted) -> None:
        spare = demoted.spare
        client = StageClient(self._control.connect(spare.address), spare.address, 0)
        try:
            await client.stand_by(spare.lost_epoch, replace=demoted.replace)
        finally:
            await client.close()

    async def _hold(self) -> None:
        """Loads one stage after the other, so that it is no load that serving notices."""
        while self._held:
            chosen = self._next_to_hold() if self._all_serve() else None
            if chosen is None:
                await self._control.change()
                continue
            spare, placement = chosen
            # Before anything is waited for: from now on no place is given to it.
            spare.loads_in_advance = True
            try:
                await self._load(spare, placement)
            except StagemeshError as error:
                log.warning("a spare cannot hold stage %d: %s", placement.pp_rank, error.message)
                again_at = asyncio.get_running_loop().time() + HOLD_PAUSE_SECONDS
                self._not_before[spare.worker_id, place_of(placement)] = again_at
            finally:
                spare.loads_in_advance = False

    def _next_to_hold(self) -> tuple[Spare, StagePlacement] | None:
        now = asyncio.get_running_loop().time()
        self._not_before = {who: at for who, at in self._not_before.items() if at > now}
        spares = self._control.membership.ready_spares(now)
        return to_hold(self._held, spares, self._not_before.keys())

    async def _load(self, spare: Spare, placement: StagePlacement) -> None:
        """Lets a spare hold the weights of a place. Raises `StagemeshError`."""
        client = StageClient(self._control.connect(spare.address), spare.address, placement.pp_rank)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HOLD_STALL_SECONDS) as limit:

                def on_progress(pp_rank: int, progress: stage_worker_pb2.LoadProgress) -> None:
                    limit.reschedule(loop.time() + HOLD_STALL_SECONDS)

                plan = stage_plan(self._plan, placement, 0)
                await client.load(plan, on_progress, in_advance=True)
                spare.status.CopyFrom(await client.status())
        except TimeoutError:
            raise StageFailed(
                f"the spare at {spare.address} has got no further with loading for "
                f"{HOLD_STALL_SECONDS:.0f} s; its log lines say where it is"
            ) from None
        finally:
            await client.close()
        log.info("the spare at %s holds the weights of stage %d", spare.address, placement.pp_rank)

    def states(self) -> Iterator[tuple[str, int]]:
        """(state, spares in it), of `STANDBY_STATES`."""
        now = asyncio.get_running_loop().time()
        states = [state_of(spare, now) for spare in self._control.membership.spares]
        return ((state, states.count(state)) for state in STANDBY_STATES)

    async def dismiss(self) -> None:
        """Tells every spare to leave."""
        async with asyncio.TaskGroup() as tasks:
            for spare in self._control.membership.spares:
                tasks.create_task(self._dismiss(spare))

    async def _dismiss(self, spare: Spare) -> None:
        client = StageClient(self._control.connect(spare.address), spare.address, 0)
        try:
            await client.drain()
        finally:
            await client.close()


def state_of(spare: Spare, now: float) -> str:
    """One of `STANDBY_STATES`."""
    if spare.is_silent(now):
        return "silent"
    if spare.is_ready:
        return "ready"
    loads = spare.status.state == stage_worker_pb2.COMPONENT_STATE_LOADING
    return "loading" if loads or spare.loads_in_advance else "starting"
