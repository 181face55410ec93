"""The gateway process: front doors, engine and control service on one event loop.

    bind everything ─> start workers (serve only) ─> mesh comes up ─> serve ─> drain ─> leave

Ports are bound before any other process is started, so a port in use costs
nothing; from then on `/health` answers, and `/ready` says what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import uvloop

from gateway.banner import banner
from gateway.door_security import DoorSecurity, door_security
from gateway.engine.engine import EngineConfig, MeshEngine
from gateway.engine.scheduled_step import SchedulerLimits
from gateway.engine.waiting_queue import SchedulingPolicy
from gateway.frontend.frontend import Frontend, ModelAssets, load_assets
from gateway.grpc_server.server import create_inference_server
from gateway.mesh import Mesh
from gateway.observer import MeasuringObserver
from gateway.pipeline.mesh_pipeline import MeshPipeline
from gateway.recovery import RecoveryLimits
from gateway.rest.app import RestConfig, create_rest_app
from gateway.rest.server import RestServer
from services.config import DEFAULT_MASTER_PORT, ServeConfig
from services.control.membership import Membership
from services.control.server import control_server
from services.control.service import ControlService
from services.errors import ConfigError, StagemeshError, failure_of, for_good
from services.launch.deployment import Deployment, deploy
from services.launch.launcher import Launcher, WorkerExit
from services.launch.process import TIMER_SLACK_SECONDS, allow_late_timers
from services.rpc.addresses import join_host_port
from services.telemetry.logging import setup_logging
from services.telemetry.metrics import Metrics
from services.telemetry.step_trace import StepTrace
from stagemesh.version import __version__

log = logging.getLogger("stagemesh.gateway")

INTERRUPT_DRAIN_SECONDS = 1.0
"""After Ctrl-C somebody waits at the terminal."""
DOOR_GRACE_SECONDS = 1.0
"""For last bytes to reach clients after their requests are over."""
AHEAD_BY_DEFAULT = ("sim",)
"""Devices on which decodes are sent ahead of their token unless told otherwise. A CPU's cores are
needed by the gateway itself; on accelerators it has not been measured yet."""


class Stopped(Exception):
    """The gateway was asked to stop and has drained; ends its task group."""


def run(config: ServeConfig) -> int:
    """`stagemesh gateway`: waits for stage workers that others start. Returns the exit code."""
    return _run(config, launch_workers=False)


def serve(config: ServeConfig) -> int:
    """`stagemesh serve`: the gateway and all stage workers of this machine."""
    return _run(config, launch_workers=True)


def _run(config: ServeConfig, *, launch_workers: bool) -> int:
    setup_logging(process="gateway")
    # The engine waits for events; its timers are deadlines of seconds.
    allow_late_timers(TIMER_SLACK_SECONDS)
    failure: StagemeshError | None = None
    with contextlib.ExitStack() as stack:
        try:
            deployment, assets, doors = _prepare(config, stack, launch_workers=launch_workers)
            trace = None if config.step_trace is None else StepTrace(Path(config.step_trace))
        except ConfigError as error:
            raise for_good(error) from error
        try:
            uvloop.run(_serve_until_stopped(deployment, assets, doors, trace))
        except* Stopped:
            pass
        except* StagemeshError as errors:
            failure = failure_of(errors)
        except* Exception as errors:
            log.exception("the gateway failed unexpectedly", exc_info=errors)
            failure = StagemeshError("the gateway failed unexpectedly; its log has the cause")
    if failure is not None:
        # Outside of the handler, which would wrap it in a group again.
        raise failure
    return 0


def _prepare(
    config: ServeConfig, stack: contextlib.ExitStack, *, launch_workers: bool
) -> tuple[Deployment, ModelAssets, DoorSecurity]:
    """All that can be refused before a port is bound or a worker started. Outside of the
    event loop: a download may take long, and Ctrl-C must end it. Raises `ConfigError`."""
    doors = door_security(config)
    deployment = deploy(config, stack, launch_workers=launch_workers)
    return deployment, load_assets(config, deployment.model_path), doors


class _StopRequest:
    """Set by signals: the first one asks for a drain, a second one is impatience."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.impatient = asyncio.Event()
        self.drain_seconds = INTERRUPT_DRAIN_SECONDS

    def ask(self, drain_seconds: float) -> None:
        """A signal has come."""
        if self.asked.is_set():
            self.impatient.set()
        self.drain_seconds = drain_seconds
        self.asked.set()


async def _serve_until_stopped(
    deployment: Deployment, assets: ModelAssets, doors: DoorSecurity, trace: StepTrace | None
) -> None:
    stop = _StopRequest()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.ask, INTERRUPT_DRAIN_SECONDS)
    loop.add_signal_handler(signal.SIGTERM, stop.ask, deployment.config.drain_timeout)
    try:
        await Gateway(deployment, assets, doors, trace).run(stop)
    finally:
        if trace is not None:
            trace.close()


class Gateway:
    """Everything in the gateway process, and the order in which it comes and goes."""

    def __init__(
        self,
        deployment: Deployment,
        assets: ModelAssets,
        doors: DoorSecurity,
        trace: StepTrace | None,
    ) -> None:
        config, plan = deployment.config, deployment.plan
        self._config = config
        self._plan = plan
        self._launcher = deployment.launcher
        self._tls = deployment.tls
        self._doors = doors
        self._assets = assets
        self._metrics = Metrics()
        self._control = ControlService(
            Membership(
                plan.shape,
                plan.placements,
                plan.fingerprint,
                plan.device,
                nodes_planned=deployment.launcher is not None,
            ),
            tls=deployment.tls,
        )
        replica_sequences = config.max_num_seqs + config.max_queued_requests
        self._mesh = Mesh(
            plan,
            self._control,
            self._make_engine,
            MeasuringObserver(self._metrics, trace),
            config.join_timeout_seconds,
            RecoveryLimits(config.max_recovery_attempts, config.recovery_timeout_seconds),
            replica_sequences,
            config.standby_stages,
        )
        self._control.tell_of(self._mesh, Path(plan.stage_plan.model_path))
        self._metrics.watch_engine(self._mesh.stats)
        self._metrics.stages.watch_memory(self._mesh.stage_memory)
        self._metrics.stages.watch_progress(self._stalls)
        self._metrics.recovery.watch_epochs(self._mesh.epochs)
        self._metrics.recovery.watch_standby(self._mesh.spares)
        self._frontend = Frontend(
            self._mesh,
            assets,
            model_names=config.served_model_name or (_default_name(config),),
            max_model_len=plan.max_model_len,
            vocab_size=plan.facts.vocab_size,
            metrics=self._metrics,
            max_requests=plan.shape.dp_size * replica_sequences,
            num_replicas=plan.shape.dp_size,
            seed=config.seed,
            by_priority=SchedulingPolicy(config.scheduling_policy) is SchedulingPolicy.PRIORITY,
        )
        self._doors_stop = asyncio.Event()
        self._doors_closed = asyncio.Event()
        self._stopping = False

    def _make_engine(self, pipeline: MeshPipeline, num_blocks: int) -> MeshEngine:
        limits = SchedulerLimits(
            num_blocks=num_blocks,
            block_size=self._config.block_size,
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            num_stages=pipeline.num_stages,
            async_batch_depth=self._config.pp_async_batch_depth,
            async_scheduling=self._schedules_ahead(),
            enable_prefix_caching=self._config.enable_prefix_caching,
            policy=SchedulingPolicy(self._config.scheduling_policy),
        )
        return MeshEngine(
            pipeline,
            self._assets.tokenizer.backend,
            EngineConfig(limits, self._config.max_queued_requests),
            self._metrics,
        )

    def _schedules_ahead(self) -> bool:
        asked = self._config.async_scheduling
        return self._plan.device in AHEAD_BY_DEFAULT if asked is None else asked

    async def run(self, stop: _StopRequest) -> None:
        """Serves until stopped (`Stopped`) or failed (a `StagemeshError`)."""
        config = self._config
        control = control_server(self._control)
        inference_server = create_inference_server(self._frontend, keys=self._doors.keys)
        rest_server = RestServer(
            create_rest_app(
                self._frontend,
                self._mesh,
                self._mesh.view,
                self._metrics,
                RestConfig(self._doors.keys, config.allowed_origins, __version__),
                not_ready_reason=self._why_not_ready,
            ),
            None if self._doors.rest_tls is None else self._doors.rest_tls.context,
        )
        launcher = self._launcher
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._doors.renewed())
            stack.callback(self._frontend.close)
            stack.push_async_callback(self._control.close)
            stack.push_async_callback(self._mesh.close)
            stack.callback(rest_server.close)
            rest_port = rest_server.bind(config.host, config.port)
            grpc_port = inference_server.bind(
                config.host, config.grpc_port, tls=self._tls, flag="--grpc-port"
            )
            master_port = control.bind(
                config.master_addr,
                self._wanted_master_port(),
                tls=self._tls,
                flag="--master-port",
            )
            await control.start()
            log.info("workers join at %s", join_host_port(config.master_addr, master_port))
            stack.push_async_callback(control.stop, grace_seconds=0.0)
            await inference_server.start()
            stack.push_async_callback(inference_server.stop, grace_seconds=DOOR_GRACE_SECONDS)
            if launcher is not None:
                stack.push_async_callback(launcher.stop)
                await launcher.start(config.master_addr, master_port)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._serve_rest(rest_server))
                tasks.create_task(self._run_mesh())
                tasks.create_task(self._announce(rest_port, grpc_port))
                tasks.create_task(self._stop_on_request(stop))
                if launcher is not None:
                    tasks.create_task(self._watch_workers(launcher))

    def _wanted_master_port(self) -> int:
        if self._config.master_port is not None:
            return self._config.master_port
        # Nobody outside asks for the control port of a mesh that starts all its workers.
        starts_all = self._launcher is not None and self._config.nnodes == 1
        return 0 if starts_all else DEFAULT_MASTER_PORT

    def _stalls(self) -> Iterator[tuple[int, int, float]]:
        return ((p.dp_rank, p.pp_rank, p.stalled_seconds) for p in self._mesh.progress())

    def _why_not_ready(self) -> str | None:
        return self._mesh.not_ready_reason() or None

    async def _serve_rest(self, server: RestServer) -> None:
        try:
            await server.run(self._doors_stop, grace_seconds=DOOR_GRACE_SECONDS)
        finally:
            self._doors_closed.set()

    async def _run_mesh(self) -> None:
        failure: StagemeshError | None = None
        try:
            await self._mesh.run()
        except* StagemeshError as errors:
            failure = failure_of(errors)
        # Workers that leave one after the other are no failure once the mesh goes down.
        if failure is not None and not self._stopping:
            # Clients have been told; let their last bytes out before everything ends.
            log.error("the mesh has failed: %s", failure.message)
            await self._close_doors()
            # A model that does not fit what the ranks have found will not fit the next time.
            raise for_good(failure) if isinstance(failure, ConfigError) else failure

    async def _close_doors(self) -> None:
        """Takes no more connections and waits, bounded, for the last bytes to go out."""
        self._doors_stop.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._doors_closed.wait(), 2 * DOOR_GRACE_SECONDS)

    async def _announce(self, rest_port: int, grpc_port: int) -> None:
        await self._mesh.ready_event.wait()
        host = self._config.host
        model = self._frontend.model_names[0]
        chat = self._assets.chat_template is not None
        keys, tls = self._doors.keys.required, self._doors.rest_tls is not None
        print(banner(host, rest_port, grpc_port, model, chat=chat, keys=keys, tls=tls), flush=True)

    async def _watch_workers(self, launcher: Launcher) -> None:
        ended = await launcher.watch(self._goes_on, self._is_missed)
        if not self._stopping and self._is_missed(ended):
            self._mesh.fail(f"{ended.name} {ended.how}; its log lines say why")

    def _is_missed(self, ended: WorkerExit) -> bool:
        """Whether the mesh cannot go on without a worker that is not started again."""
        if self._stopping:
            return True
        return ended.placement is not None and not self._mesh.goes_on_without(ended.placement)

    def _goes_on(self, ended: WorkerExit) -> bool:
        if self._stopping:
            return False
        how = f"its process {ended.how}"
        # A spare that could not join is told why by its head, and would be told the same again.
        goes_on = self._mesh.worker_ended(ended.node_rank, ended.pid, how)
        return goes_on or (ended.is_spare and ended.had_joined)

    async def _stop_on_request(self, stop: _StopRequest) -> None:
        await stop.asked.wait()
        log.info("stopping: no new requests, those that run get %.0f s", stop.drain_seconds)
        async with asyncio.TaskGroup() as tasks:
            hurry = tasks.create_task(self._hurry(stop))
            await self._mesh.drain(stop.drain_seconds)
            hurry.cancel()
        await self._close_doors()
        self._stopping = True
        await self._mesh.dismiss_workers()
        raise Stopped

    async def _hurry(self, stop: _StopRequest) -> None:
        await stop.impatient.wait()
        log.info("stopping now")
        await self._mesh.drain(0.0)


def _default_name(config: ServeConfig) -> str:
    """A directory serves under its last part, a Hub id and the demo model under their own name."""
    return Path(config.model).name if os.path.isdir(config.model) else config.model
