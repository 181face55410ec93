"""Facts of a node to findings: versions, ports, limits, disk, shared memory."""

from __future__ import annotations

import errno

import pytest

from services.config import ServeConfig
from services.doctor.facts import DiskFacts, LimitFacts, PortFacts
from services.doctor.findings import Check, Finding, Outcome, all_well
from services.doctor.node_checks import (
    check_disk,
    check_limits,
    check_ports,
    check_shared_memory,
    check_versions,
)
from services.software import Version
from tests.unit.doctor.node_facts import GIB, INSTALLED, node

ONE_NODE = ServeConfig(model="m")
HEADLESS = ServeConfig(model="m", nnodes=2, node_rank=1, headless=True)


def only(findings: list[Finding], outcome: Outcome) -> Finding:
    (finding,) = [finding for finding in findings if finding.outcome is outcome]
    return finding


def test_a_node_that_has_everything() -> None:
    (finding,) = check_versions(node(), ONE_NODE, "cpu")
    assert finding.outcome is Outcome.OK
    assert "torch 2.13.0+cpu" in finding.what


def test_what_is_not_installed_names_the_extra() -> None:
    without = tuple(v for v in INSTALLED if v.name not in ("torch", "tokenizers"))
    finding = only(list(check_versions(node(without), ONE_NODE, "cpu")), Outcome.FAILED)
    assert finding.what == "torch, tokenizers are not installed here"
    assert finding.remedy == "pip install 'stagemesh-server[gateway,worker]'"
    # Only the head has a gateway.
    finding = only(list(check_versions(node(without), HEADLESS, "cpu")), Outcome.FAILED)
    assert finding.what == "torch is not installed here"


def test_torch_and_torch_npu_must_be_of_one_release() -> None:
    cann = Version("cann", "8.3.RC1")
    pair = (*INSTALLED, Version("torch-npu", "2.13.0.post1"), cann)
    assert all_well(check_versions(node(pair), ONE_NODE, "npu"))
    other = (*INSTALLED, Version("torch-npu", "2.12.0"), cann)
    finding = only(list(check_versions(node(other), ONE_NODE, "npu")), Outcome.FAILED)
    assert "torch is 2.13.0+cpu and torch-npu is 2.12.0" in finding.what
    assert "torch==2.12.0" in finding.remedy


def test_an_npu_without_cann_is_worth_a_look() -> None:
    found = list(
        check_versions(node((*INSTALLED, Version("torch-npu", "2.13.0"))), ONE_NODE, "npu")
    )
    assert "CANN" in only(found, Outcome.WARNING).what


@pytest.mark.parametrize(
    ("error", "what", "remedy"),
    [
        (errno.EADDRINUSE, "127.0.0.1:8000 (--port) is in use by another process", "--port"),
        (errno.EADDRNOTAVAIL, "127.0.0.1 (--host) is no address of this machine", "--host"),
        (errno.EACCES, "127.0.0.1:8000 (--port) cannot be had: Permission denied", "--port"),
    ],
)
def test_a_port_that_cannot_be_had(error: int, what: str, remedy: str) -> None:
    port = PortFacts("--port", "127.0.0.1", 8000, error)
    (finding,) = check_ports((port,), own_mesh_runs=False)
    assert (finding.outcome, finding.what) == (Outcome.FAILED, what)
    assert remedy in finding.remedy


def test_ports_of_a_running_mesh_are_no_fault() -> None:
    port = PortFacts("--port", "::1", 8000, errno.EADDRINUSE)
    (finding,) = check_ports((port,), own_mesh_runs=True)
    assert finding.outcome is Outcome.OK
    assert "[::1]:8000" in finding.what


@pytest.mark.parametrize("error", [errno.EADDRINUSE, errno.EADDRNOTAVAIL])
def test_who_answers_at_the_heads_port_has_it_rightly(error: int) -> None:
    port = PortFacts("--master-port", "10.0.0.1", 29550, error)
    (finding,) = check_ports((port,), own_mesh_runs=False, answering="the doctor")
    assert (finding.outcome, finding.what) == (
        Outcome.OK,
        "10.0.0.1:29550 (--master-port) is in use by the doctor that answers there",
    )


def test_a_headless_node_needs_no_port() -> None:
    (finding,) = check_ports((), own_mesh_runs=False)
    assert finding.outcome is Outcome.OK


@pytest.mark.parametrize(
    ("limits", "remedy"),
    [
        (LimitFacts(1024, None, None), "ulimit -n 65536"),
        (LimitFacts(1024, 8192, None), "ulimit -n 8192"),
        (LimitFacts(1024, 2048, None), "raise the hard limit, which is 2048"),
    ],
)
def test_too_few_open_files_say_how_to_get_more(limits: LimitFacts, remedy: str) -> None:
    (finding,) = check_limits(limits, device="cpu", config=ONE_NODE)
    assert finding.outcome is Outcome.WARNING
    assert "1024 files" in finding.what
    assert remedy in finding.remedy


def test_locked_memory_matters_between_npu_nodes_only() -> None:
    limits = LimitFacts(None, None, 8 << 20)
    (finding,) = check_limits(limits, device="npu", config=HEADLESS)
    assert finding.outcome is Outcome.WARNING and "8.0 MiB" in finding.what
    for device, config in (("npu", ONE_NODE), ("cpu", HEADLESS)):
        (finding,) = check_limits(limits, device=device, config=config)
        assert finding.outcome is Outcome.OK
        assert finding.what == "open files unlimited, locked memory 8.0 MiB"


def test_a_full_disk_is_named() -> None:
    full = DiskFacts("/tmp", "temporary files", GIB // 2)
    roomy = DiskFacts("/models", "models", 2 * GIB)
    (finding,) = check_disk((full, roomy))
    assert finding.outcome is Outcome.WARNING
    assert finding.what == "/tmp (temporary files) has 512 MiB free"
    (finding,) = check_disk((roomy,))
    assert finding.outcome is Outcome.OK


def test_shared_memory_of_a_container_is_small() -> None:
    small = node(shared_memory_bytes=64 << 20)
    (finding,) = check_shared_memory(small, device="npu", num_ranks=4)
    assert finding.outcome is Outcome.WARNING
    assert "64.0 MiB" in finding.what and "--shm-size" in finding.remedy
    for device, num_ranks in (("cpu", 4), ("npu", 1)):
        (finding,) = check_shared_memory(small, device=device, num_ranks=num_ranks)
        assert finding.outcome is Outcome.OK
    unknown = node(shared_memory_bytes=None)
    assert list(check_shared_memory(unknown, device="npu", num_ranks=4)) == []


def test_every_check_of_this_module_has_its_own_name() -> None:
    names = {
        finding.check
        for finding in (
            *check_versions(node(), ONE_NODE, "cpu"),
            *check_ports((), own_mesh_runs=False),
            *check_limits(node().limits, device="cpu", config=ONE_NODE),
            *check_disk(node().disks),
            *check_shared_memory(node(), device="cpu", num_ranks=1),
        )
    }
    assert names == {
        Check.VERSIONS,
        Check.PORTS,
        Check.LIMITS,
        Check.DISK,
        Check.SHARED_MEMORY,
    }
