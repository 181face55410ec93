"""Starts every rank of a mesh as a Ray actor, hears of their end, sees them out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from services.config import ServeConfig
from services.launch.launcher import WorkerExit
from services.launch.process import how_it_ended
from services.launch.ray_bundles import RankPlace
from services.launch.ray_cluster import RankRun, RayCluster, one_line
from services.launch.ray_rank import RankEnd, RankOrder
from services.telemetry.logging import LOG_LEVEL_VARIABLE

STOP_TIMEOUT_SECONDS = 2.0
"""A worker that is told to leave does so in well under a second."""


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
        self._running: dict[asyncio.Future[RankEnd], tuple[RankPlace, RankRun]] = {}

    async def start(self, master_addr: str, master_port: int) -> None:
        """Starts every actor; Ray does so in the background."""
        for place in self._places:
            run = self._cluster.run_rank(place, self._order(place, master_addr, master_port))
            self._running[asyncio.wrap_future(run.end)] = (place, run)

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

    async def first_exit(self) -> WorkerExit:
        """Waits until one worker or its actor ends."""
        done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        first = done.pop()
        return self._exit_of(self._running[first][0], first)

    def _exit_of(self, place: RankPlace, ended: asyncio.Future[RankEnd]) -> WorkerExit:
        where = f"on {place.address}"
        try:
            end = ended.result()
        except self._cluster.errors as error:
            return WorkerExit(place.placement, f"{where} ended with its actor ({one_line(error)})")
        if end.code is None:
            return WorkerExit(place.placement, f"{where} could not be started ({end.why})")
        how = f"{where} {how_it_ended(end.code)}"
        return WorkerExit(place.placement, how, dismissed=end.code == 0)

    async def stop(self) -> None:
        """Gives the workers, which have been told to leave, a moment; ends what is left."""
        if not self._running:
            return
        _, left = await asyncio.wait(self._running, timeout=STOP_TIMEOUT_SECONDS)
        for end in left:
            self._cluster.kill(self._running[end][1])
        if left:
            await asyncio.wait(left, timeout=STOP_TIMEOUT_SECONDS)
        for end in self._running:
            # Read here too, since nobody else may: they say what the log has said already.
            if end.done() and not end.cancelled():
                end.exception()
        self._running.clear()
