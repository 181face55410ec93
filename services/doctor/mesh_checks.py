"""What the head's answer, or its silence, means for this node. Facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from services.config import ServeConfig
from services.control.diagnosis import progress_from_proto
from services.control.progress import StageProgress, explain_progress, furthest_behind
from services.doctor.facts import NodeFacts
from services.doctor.findings import Check, Finding, failed, ok, warning
from services.doctor.head import HeadFacts, LinkFacts
from services.rpc.reach import Obstacle, Unanswered
from services.topology.fingerprint import differences
from services.units import counted, human_bytes
from stagemesh.v1 import control_pb2, stage_worker_pb2, topology_pb2

MAX_CLOCK_OFFSET_SECONDS = 1.0
"""Beyond this, log lines of two nodes cannot be put in order."""
STUCK_SECONDS = 5.0
"""A stage that holds a step for longer is worth a word: steps take well under a second on an
accelerator, and seconds only where a long prompt runs on a CPU."""
SILENT_SECONDS = 2.5
"""Heartbeats come every second, and after 3 s of silence the mesh gives a worker up."""
_PHASES = {
    stage_worker_pb2.RANK_PHASE_CONTROL_WAIT: "has waited for a step",
    stage_worker_pb2.RANK_PHASE_RECEIVE: "has waited for activations",
    stage_worker_pb2.RANK_PHASE_COMPUTE: "has computed",
    stage_worker_pb2.RANK_PHASE_SEND: "has waited to hand activations on",
}
# Of the doctor's other versions: what must be equal on all nodes, and what had better be.
_MUST_BE_EQUAL = ("cann", "npu driver")
_BETTER_EQUAL = (
    "python",
    "nvidia driver",
    "grpcio",
    "protobuf",
    "safetensors",
    "tokenizers",
    "ray",
)


def check_silence(silence: Unanswered, config: ServeConfig) -> Finding:
    """Which of address and port is wrong, where nobody answered as a head."""
    where, detail = silence.address, silence.detail
    match silence.obstacle:
        case Obstacle.NAME:
            what = f"the name in {where} does not resolve: {detail}"
            remedy = "give --master-addr the head's address, or add its name to /etc/hosts"
        case Obstacle.ROUTE:
            what = f"no way leads to {where}: {detail}"
            remedy = "give --master-addr an address of a network that this node is in"
        case Obstacle.SILENCE:
            what = f"nobody answers at {where}: {detail}"
            remedy = (
                "check that --master-addr is the head's address, and that no firewall drops "
                "connections to --master-port"
            )
        case Obstacle.REFUSED:
            return _refused(where, config)
        case Obstacle.NOT_GRPC:
            what = f"what listens at {where} is no gRPC server: {detail}"
            remedy = (
                'give --master-port the port in the head\'s line "workers join at"; --port is the '
                "REST API's"
            )
        case Obstacle.TLS:
            what = f"no TLS connection to {where}: {detail}"
            remedy = (
                "start both sides with --tls-dir, or neither; certificates of one CA, valid now, "
                "with the host that is dialled (docs/security.md)"
            )
        case Obstacle.ROLE:
            what = f"{where} does not answer this certificate: {detail}"
            remedy = "give the doctor an operator's: stagemesh certs issue --role operator"
        case Obstacle.OTHER_SERVICE:
            what = f"what listens at {where} has no control service, or an older one: {detail}"
            remedy = (
                'give --master-port the port in the head\'s line "workers join at", which is not '
                "--grpc-port, and install the same version of stagemesh on every node"
            )
        case Obstacle.HUNG:
            what = f"{where} takes connections and does not answer: {detail}"
            remedy = "the head is stopped or overloaded: look at its log, or start it again"
        case Obstacle.ERROR:
            what = f"{where} answers with an error: {detail}"
            remedy = "look at the log of the head"
    return failed(Check.HEAD, what, remedy)


def _refused(where: str, config: ServeConfig) -> Finding:
    what = f"nothing listens at {where}"
    if config.node_rank == 0:
        return warning(
            Check.HEAD,
            f"{what}: no mesh runs here",
            'if one does, give --master-port the port in its line "workers join at"',
        )
    return failed(
        Check.HEAD,
        what,
        'start the head, or compare --master-port with its line "workers join at"; before a head '
        "is there, stagemesh doctor --listen on its node answers in its place",
    )


def check_head(
    head: HeadFacts,
    config: ServeConfig,
    node: NodeFacts,
    fingerprint: topology_pb2.Fingerprint,
    device: str | None,
) -> Iterator[Finding]:
    """Everything that is known once a head has answered."""
    kind = "a doctor" if head.answer.is_doctor else "the head"
    yield ok(Check.HEAD, f"{kind} on {head.answer.node} answers at {head.address}")
    yield from check_join(head.answer, config, node, fingerprint, device)
    yield from check_versions_equal(head.answer, config, node)
    yield from check_clock(head.link, head.answer.node)
    yield from check_network(head)
    if not head.answer.is_doctor:
        yield from check_members(head.answer)
        yield from check_progress(head.answer)


def check_join(
    answer: control_pb2.DiagnoseResponse,
    config: ServeConfig,
    node: NodeFacts,
    fingerprint: topology_pb2.Fingerprint,
    device: str | None,
) -> Iterator[Finding]:
    """Every reason for which the head would send this node's workers away. `device` is the kind
    that this node would bring; None where it is only looking."""
    me = f"node {config.node_rank} ({node.host})"
    complaints = [
        failed(Check.JOIN, difference.words(me), difference.remedy)
        for difference in differences(answer.fingerprint, fingerprint)
    ]
    if answer.device and device is not None and device != answer.device:
        complaints.append(
            failed(
                Check.JOIN,
                f"device differs: the head's mesh runs on {answer.device} and {me} has {device}",
                "give both the same --device",
            )
        )
    # Who only looks has node rank 0 because none was stated, and takes nobody's place.
    takes_a_place = bool(config.model) or config.node_rank > 0
    holders = {
        member.node: member
        for member in answer.members
        if takes_a_place and member.node_rank == config.node_rank and member.node != node.host
    }
    for member in holders.values():
        complaints.append(
            failed(
                Check.JOIN,
                f"node rank {config.node_rank} is held by {member.node} (worker "
                f"{member.address}, pid {member.pid}); this is {node.host}",
                "give each node a --node-rank of its own; every node but the head also needs "
                "--headless",
            )
        )
    yield from complaints
    if not complaints:
        compared = [field.name for field in fingerprint.fields]
        common = {field.name for field in answer.fingerprint.fields}
        equal = ", ".join(name for name in compared if name in common)
        yield ok(Check.JOIN, f"equal here and at the head: {equal}")


def check_versions_equal(
    answer: control_pb2.DiagnoseResponse, config: ServeConfig, node: NodeFacts
) -> Iterator[Finding]:
    """Drivers and libraries that the fingerprint does not cover."""
    for field in answer.versions:
        ours = node.version(field.name)
        if ours is None or _comparable(field.name, ours) == _comparable(field.name, field.value):
            continue
        what = (
            f"{field.name} differs: {answer.node} has {field.value} and node {config.node_rank} "
            f"({node.host}) has {ours}"
        )
        remedy = f"install the same version of {field.name} on every node"
        if field.name in _MUST_BE_EQUAL:
            yield failed(Check.VERSIONS, what, remedy)
        elif field.name in _BETTER_EQUAL:
            yield warning(Check.VERSIONS, what, remedy)


def _comparable(name: str, version: str) -> str:
    """What of a version counts: of Python's, the part that packages are built for."""
    return ".".join(version.split(".")[:2]) if name == "python" else version


def check_clock(link: LinkFacts, other: str) -> Iterator[Finding]:
    """Wall clocks of two nodes; what the measurement cannot tell does not count."""
    offset, doubt = link.clock_offset_seconds, link.clock_uncertainty_seconds
    if abs(offset) - doubt > MAX_CLOCK_OFFSET_SECONDS:
        direction = "ahead of" if offset > 0 else "behind"
        yield warning(
            Check.CLOCK,
            f"the clock of {other} is {abs(offset):.1f} s {direction} this node's: log lines of "
            "the two cannot be put in order",
            "let chrony or systemd-timesyncd set the clock on every node",
        )
    else:
        yield ok(
            Check.CLOCK,
            f"{other} and this node differ by {abs(offset) * 1e3:.1f} ms (known to within "
            f"{doubt * 1e3:.1f} ms)",
        )


def check_network(head: HeadFacts) -> Iterator[Finding]:
    """Round trip for each hop over gRPC, and the bandwidth to the head."""
    yield ok(
        Check.NETWORK,
        f"to the head: round trip {_milliseconds(head.link.round_trip_seconds)}, "
        f"{human_bytes(head.link.bytes_per_second)}/s (gRPC; the collective library may use "
        "another link)",
    )
    for peer, member in zip(head.peers, head.answer.members, strict=True):
        name = f"{_stage(member.placement)} at {peer.address}"
        if peer.round_trip_seconds is None:
            yield failed(
                Check.NETWORK,
                f"{name} cannot be reached from this node",
                f"open every TCP port between the nodes, or set VLLM_HOST_IP on {member.node} to "
                "an address that the others reach",
            )
            continue
        from_head = (
            f", from the head {_milliseconds(member.round_trip_seconds)}"
            if member.HasField("round_trip_seconds")
            else ""
        )
        yield ok(
            Check.NETWORK,
            f"to {name}: round trip {_milliseconds(peer.round_trip_seconds)}{from_head}",
        )


def check_members(answer: control_pb2.DiagnoseResponse) -> Iterator[Finding]:
    """Who has joined, who is missing, who says nothing or has failed."""
    complaints = []
    if answer.missing:
        joined = ", ".join(f"{_stage(m.placement)} from {m.node}" for m in answer.members)
        complaints.append(
            warning(
                Check.MESH,
                f"{', '.join(answer.missing)} {'has' if len(answer.missing) == 1 else 'have'} not "
                f"joined; joined: {joined or 'nobody'}",
                "start the node that should hold it; if it is started, look at its log and run "
                "stagemesh doctor there",
            )
        )
    for member in answer.members:
        name = f"the worker of {_stage(member.placement)} on {member.node} ({member.address})"
        log = "look at its log lines"
        if member.status.error.message:
            complaints.append(
                failed(Check.MESH, f"{name} has failed: {member.status.error.message}", log)
            )
        elif not member.HasField("status"):
            last = f"last heartbeat {member.silent_seconds:.1f} s ago"
            complaints.append(_not_heard(f"{name} does not answer the head ({last})"))
        elif member.silent_seconds > SILENT_SECONDS:
            complaints.append(
                _not_heard(f"{name} has sent no heartbeat for {member.silent_seconds:.1f} s")
            )
    yield from complaints
    if complaints:
        return
    members = counted(len(answer.members), "worker")
    if answer.not_ready_reason:
        yield warning(
            Check.MESH,
            f"{members} joined; no requests are taken yet: {answer.not_ready_reason}",
            "wait, and ask again",
        )
    else:
        yield ok(Check.MESH, f"{members} joined, and requests are taken")


def _not_heard(what: str) -> Finding:
    return failed(
        Check.MESH,
        f"{what}: it is stopped, hung or cut off",
        "look at that node, and start it again",
    )


def check_progress(answer: control_pb2.DiagnoseResponse) -> Iterator[Finding]:
    """Which stage last moved, and on what the others wait, for each replica."""
    stages = [progress_from_proto(message) for message in answer.progress]
    stages.sort(key=lambda stage: (stage.dp_rank, stage.pp_rank))
    replicas = [list(group) for _, group in groupby(stages, lambda stage: stage.dp_rank)]
    for replica in replicas:
        prefix = f"replica {replica[0].dp_rank}: " if len(replicas) > 1 else ""
        doing = _doing(answer.members, replica[0].dp_rank)
        yield _progress_of(replica, doing, prefix)


def _doing(members: Sequence[control_pb2.MemberReport], dp_rank: int) -> dict[int, str]:
    """What the ranks of each stage said at their last heartbeat, by PP rank."""
    said: dict[int, list[str]] = {}
    for member in members:
        for rank in member.status.ranks:
            if member.placement.dp_rank == dp_rank and rank.phase in _PHASES:
                said.setdefault(member.placement.pp_rank, []).append(
                    f"TP rank {rank.tp_rank} {_PHASES[rank.phase]} for {rank.phase_seconds:.1f} s"
                )
    return {pp_rank: ", ".join(words) for pp_rank, words in said.items()}


def _progress_of(stages: Sequence[StageProgress], doing: Mapping[int, str], prefix: str) -> Finding:
    holder = furthest_behind(stages)
    words = explain_progress(stages, doing)
    if holder is None or words is None:
        last = max(stage.done_step_id for stage in stages)
        done = f"all stages have done step {last}" if last else "no step was run yet"
        return ok(Check.PROGRESS, f"{prefix}nothing is in flight; {done}")
    if holder.silent_seconds > STUCK_SECONDS:
        return failed(
            Check.PROGRESS,
            f"{prefix}{words}",
            f"look at the log of stage {holder.pp_rank}, and at what its processes do (py-spy "
            "dump --pid)",
        )
    moving = ", ".join(f"stage {stage.pp_rank} at step {stage.done_step_id}" for stage in stages)
    last = max(stage.sent_step_id for stage in stages)  # Later stages get steps later.
    return ok(Check.PROGRESS, f"{prefix}{moving}; step {last} was given last")


def _stage(placement: topology_pb2.Placement) -> str:
    words = f"stage {placement.pp_rank}"
    if placement.dp_rank:
        words += f" of replica {placement.dp_rank}"
    if placement.tp_ranks and placement.tp_ranks[0]:
        words += f" from TP rank {placement.tp_ranks[0]}"
    return words


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
