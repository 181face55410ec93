"""What a doctor reads off a node: files of a made-up root, ports of this machine."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from services.config import ServeConfig
from services.doctor.device_memory import device_memory
from services.doctor.gather import bind_error, gather_node, gather_ports
from services.software import Version, installed_versions
from services.topology.fit import DeviceMemory

MEMINFO = "MemTotal:       16000000 kB\nMemFree: 1000 kB\nMemAvailable:   9000000 kB\n"
MIB = 1 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_this_node() -> None:
    facts = gather_node()
    assert facts.host == socket.gethostname()
    assert facts.cores >= 1
    assert facts.version("torch") is not None
    assert facts.version("no such package") is None
    assert all(disk.free_bytes > 0 for disk in facts.disks)
    assert facts.available_memory_bytes is not None and facts.memory_bytes is not None
    assert 0 < facts.available_memory_bytes <= facts.memory_bytes


def test_versions_of_the_vendors_are_read_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    ascend = tmp_path / "usr/local/Ascend"
    write(
        ascend / "ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info",
        "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\narch=aarch64\n",
    )
    write(ascend / "driver/version.info", "Version=25.0.rc1.1\nascendhal_version=7.35.19\n")
    write(
        tmp_path / "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n",
    )
    found = set(installed_versions(tmp_path))
    assert Version("cann", "8.3.RC1") in found
    assert Version("npu driver", "25.0.rc1.1") in found
    assert Version("nvidia driver", "570.86.15") in found
    # The environment that was sourced decides.
    other = tmp_path / "opt/cann"
    write(other / "aarch64-linux/ascend_toolkit_install.info", "version=8.2.RC1\n")
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(other))
    assert Version("cann", "8.2.RC1") in set(installed_versions(tmp_path))


def test_a_port_in_use_is_found_and_a_free_one_is_left_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert bind_error("127.0.0.1", port) == errno.EADDRINUSE
        ports = gather_ports(ServeConfig(model="m", port=port, grpc_port=0))
        assert [(p.flag, p.error) for p in ports] == [
            ("--port", errno.EADDRINUSE),
            ("--grpc-port", None),
        ]
    assert bind_error("127.0.0.1", port) is None
    with socket.socket() as after:
        after.bind(("127.0.0.1", port))


def test_addresses_of_others_cannot_be_had() -> None:
    # From a documentation range (RFC 5737): nobody has it.
    assert bind_error("192.0.2.77", 0) == errno.EADDRNOTAVAIL
    assert bind_error("no.such.host.invalid", 0) == errno.EADDRNOTAVAIL


def test_which_ports_a_node_needs() -> None:
    head = ServeConfig(model="m", port=0, grpc_port=0, nnodes=2, master_port=0)
    assert [p.flag for p in gather_ports(head)] == ["--port", "--grpc-port", "--master-port"]
    assert gather_ports(ServeConfig(model="m", nnodes=2, node_rank=1, headless=True)) == ()
    assert gather_ports(ServeConfig(model="m", nnodes=2, node_rank=1)) == ()


def test_who_only_looks_need_not_have_the_heads_address() -> None:
    elsewhere = {"port": 0, "grpc_port": 0, "master_addr": "192.0.2.77", "master_port": 29550}
    looks = gather_ports(ServeConfig(model="", **elsewhere))  # type: ignore[arg-type]
    assert [p.flag for p in looks] == ["--port", "--grpc-port"]
    serves = gather_ports(ServeConfig(model="m", **elsewhere))  # type: ignore[arg-type]
    assert serves[2].error == errno.EADDRNOTAVAIL


def test_memory_of_nvidia_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...]) -> str | None:
        commands.append(command)
        return "81559, 80994\n"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    found = device_memory("cuda", 2, run)
    assert found == (DeviceMemory(81559 * MIB, 80994 * MIB),) * 2
    assert [command[1] for command in commands] == ["--id=3", "--id=1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    assert device_memory("cuda", 1, run) is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert device_memory("cuda", 1, lambda command: "[N/A]") is None
    assert device_memory("cuda", 1, lambda command: None) is None


def test_memory_of_ascend_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    output = (
        "\tNPU ID                         : 0\n"
        "\tHBM Capacity(MB)               : 65536\n"
        "\tHBM Usage Rate(%)              : 5\n"
    )
    found = device_memory("npu", 1, lambda command: output)
    assert found == (DeviceMemory(65536 * MIB, 65536 * MIB * 95 // 100),)
    assert device_memory("npu", 1, lambda command: "NPU ID : 0") is None
    assert device_memory("cpu", 1, lambda command: output) is None


def test_a_command_that_is_not_there_is_no_error() -> None:
    from services.doctor.device_memory import run_command

    assert run_command(("no-such-command-anywhere",)) is None
    assert run_command(("false",)) is None
    assert run_command(("echo", "81559, 80994")) == "81559, 80994" + os.linesep
