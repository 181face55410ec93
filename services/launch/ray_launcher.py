"""Starts every rank of a mesh as a Ray actor, starts them again, sees them out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from services.config import ServeConfig
from services.launch.keeping import keep, keep_all
from services.launch.launcher import GoesOn, IsMissed, WorkerExit
from services.launch.process import how_it_ended
from services.launch.ray_bundles import RankPlace
from services.launch.ray_cluster import RankRun, RayCluster, one_line
from services.launch.ray_rank import RankEnd, RankOrder
from services.launch.restarts import DEFAULT_LIMITS
from services.telemetry.logging import LOG_LEVEL_VARIABLE

STOP_TIMEOUT_SECONDS = 2.0
"""A worker that is told to leave does so in well under a second."""


@dataclass(slots=True)
class _Run:
    """A rank's actor, the present one."""

    place: RankPlace
    order: RankOrder
    rank_run: RankRun
    end: asyncio.Future[RankEnd]


class RayLauncher:
    """The rank actors of one mesh. Implements `services.launch.launcher.Launcher`."""

    def __init__(
        self,
        cluster: RayCluster,
        config: ServeConfig,
        model_path: Path,
        places: Sequence[RankPlace],
    ) -> None:
        """`config` says which kind of device the cluster has."""
        self._cluster = cluster
        # Ray may keep what it carries, and workers need no key; other nodes have no such file.
        self._config = replace(config, api_key=(), api_key_file=None, sim_cost=None)
        self._model_path = str(model_path)
        self._places = tuple(places)
        self._runs: list[_Run] = []

    async def start(self, master_addr: str, master_port: int) -> None:
        """Starts every actor; Ray does so in the background."""
        for place in self._places:
            order = self._order(place, master_addr, master_port)
            run = self._cluster.run_rank(place, order, start=1)
            self._runs.append(_Run(place, order, run, asyncio.wrap_future(run.end)))

    def _order(self, place: RankPlace, master_addr: str, master_port: int) -> RankOrder:
        level = os.environ.get(LOG_LEVEL_VARIABLE)
        return RankOrder(
            placement=place.placement,
            config=self._config,
            model_path=self._model_path,
            master_addr=master_addr,
            master_port=master_port,
            host=place.address,
            environment={} if level is None else {LOG_LEVEL_VARIABLE: level},
        )

    async def watch(self, goes_on: GoesOn, is_missed: IsMissed) -> WorkerExit:
        """Makes another actor where one or its worker has ended; see `Launcher.watch`."""
        return await keep_all((self._keep(run, goes_on) for run in self._runs), is_missed)

    async def _keep(self, run: _Run, goes_on: GoesOn) -> WorkerExit:
        starts = count(2)

        async def ended() -> WorkerExit:
            await asyncio.wait((run.end,))
            return self._exit_of(run.place, run.end)

        async def start() -> None:
            # An actor whose worker alone has ended holds the bundle.
            self._cluster.kill(run.rank_run)
            run.rank_run = self._cluster.run_rank(run.place, run.order, next(starts))
            run.end = asyncio.wrap_future(run.rank_run.end)

        return await keep(ended, start, goes_on, DEFAULT_LIMITS)

    def _exit_of(self, place: RankPlace, ended: asyncio.Future[RankEnd]) -> WorkerExit:
        where = f"on {place.address}"
        try:
            end = ended.result()
        except self._cluster.errors as error:
            return WorkerExit(
                place.placement,
                place.placement.node_rank,
                f"{where} ended with its actor ({one_line(error)})",
            )
        if end.code is None:
            return WorkerExit(
                place.placement,
                place.placement.node_rank,
                f"{where} could not be started ({end.why})",
            )
        return WorkerExit(
            place.placement,
            place.placement.node_rank,
            f"{where} {how_it_ended(end.code)}",
            code=end.code,
        )

    async def stop(self) -> None:
        """Gives the workers, which have been told to leave, a moment; ends what is left."""
        running = {run.end: run for run in self._runs}
        if not running:
            return
        _, left = await asyncio.wait(running, timeout=STOP_TIMEOUT_SECONDS)
        for end in left:
            self._cluster.kill(running[end].rank_run)
        if left:
            await asyncio.wait(left, timeout=STOP_TIMEOUT_SECONDS)
        for end in running:
            # Read here too, since nobody else may: they say what the log has said already.
            if end.done() and not end.cancelled():
                end.exception()
        self._runs.clear()
