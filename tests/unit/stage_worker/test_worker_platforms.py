"""Platforms on a machine without an accelerator."""

from __future__ import annotations

import pytest
import torch

from services.errors import ConfigError
from stage_worker.platforms import DEVICES, select_platform
from stage_worker.platforms.cpu import CpuPlatform
from stage_worker.platforms.cuda import CudaPlatform
from stage_worker.platforms.npu import NpuPlatform
from stagemesh.v1 import stage_worker_pb2, topology_pb2


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage_worker.platforms.npu_is_available", lambda: False)
    monkeypatch.setattr("stage_worker.platforms.npu_is_installed", lambda: False)
    monkeypatch.setattr("stage_worker.platforms.cuda_is_available", lambda: False)


@pytest.mark.usefixtures("no_accelerator")
def test_auto_is_the_cpu_where_there_is_nothing_else() -> None:
    for device in ("auto", "cpu"):
        platform = select_platform(device)
        assert (platform.name, platform.collective_backend) == ("cpu", "gloo")
        assert platform.device(3) == torch.device("cpu")


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize("device", ["npu", "cuda"])
def test_a_device_that_is_not_there_is_refused_with_what_to_do(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device {device} was asked for.*or use cpu") as refused:
        select_platform(device)
    assert refused.value.param == "device"


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'"tpu" is not known; use one of .*cuda, sim'):
        select_platform("tpu")
    assert DEVICES == ("auto", "cpu", "npu", "cuda", "sim")


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize(
    ("available", "wanted", "kind", "backend"),
    [
        ("npu", "auto", NpuPlatform, "hccl"),
        ("npu", "npu", NpuPlatform, "hccl"),
        ("cuda", "auto", CudaPlatform, "nccl"),
        ("cuda", "cuda", CudaPlatform, "nccl"),
    ],
)
def test_an_accelerator_is_taken_where_it_is(
    monkeypatch: pytest.MonkeyPatch, available: str, wanted: str, kind: type, backend: str
) -> None:
    monkeypatch.setattr(f"stage_worker.platforms.{available}_is_available", lambda: True)
    platform = select_platform(wanted)
    assert isinstance(platform, kind)
    assert platform.collective_backend == backend
    assert isinstance(select_platform("cpu"), CpuPlatform)


def test_an_index_above_the_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaPlatform, "device_count", lambda self: 2)
    with pytest.raises(ConfigError, match="cuda device 2 is wanted, but this node has 2"):
        CudaPlatform().set_up(2, 1)


def test_accelerator_cache_is_what_weights_and_the_kept_share_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CudaPlatform, "memory", lambda self: (60 << 30, 80 << 30))
    plan = stage_worker_pb2.StagePlan(gpu_memory_utilization=0.75, max_num_batched_tokens=16)
    assert CudaPlatform().default_kv_bytes(plan) == (40 << 30) - (1 << 20)


def test_ranks_of_a_cpu_mesh_share_the_cache_budget() -> None:
    def budget(pp_size: int) -> int:
        topology = topology_pb2.Topology(dp_size=1, tp_size=2, pp_size=pp_size)
        return CpuPlatform().default_kv_bytes(stage_worker_pb2.StagePlan(topology=topology))

    free, total = CpuPlatform().memory()
    assert 0 < free <= total
    assert 0 < budget(4) <= budget(1) <= free


class FakeDevice:
    """A device whose queue is done when told, and what was asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_done = False
        self.asked: list[str] = []
        monkeypatch.setattr(CudaPlatform, "device_count", lambda _: 2)
        for name in ("set_device_index", "max_memory_allocated"):
            monkeypatch.setattr(torch.accelerator, name, lambda index, name=name: index)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda: self)
        monkeypatch.setattr(
            torch.accelerator, "synchronize", lambda: pytest.fail("waits for every stream")
        )
        monkeypatch.setattr(torch, "Event", lambda kind: self)

    def synchronize(self) -> None:
        self.asked.append("synchronize")

    def record(self, stream: object) -> None:
        assert stream is self

    def query(self) -> bool:
        self.asked.append("query")
        return self.is_done


def test_an_accelerator_waits_for_its_own_stream_with_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A receive that is posted for a later step is on the device too, on another stream."""
    device = FakeDevice(monkeypatch)
    platform = CudaPlatform()
    platform.synchronize()
    assert device.asked == ["synchronize"]
    assert not platform.finish(0.01)
    assert len(device.asked) > 2
    device.is_done = True
    assert platform.finish(0.0)
    assert CpuPlatform().finish(0.0)


def test_any_thread_asks_for_the_memory_of_the_ranks_own_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeDevice(monkeypatch)
    platform = CudaPlatform()
    platform.set_up(1, torch.get_num_threads())
    assert platform.memory_peak_bytes() == 1
