"""Which devices a node has, from /dev and the environment, without torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.errors import ConfigError
from services.launch.devices import resolve_device


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_without_an_accelerator_the_cpu_serves(dev: Path) -> None:
    (dev / "davinci_manager").touch()
    assert resolve_device("auto", dev=dev) == ("cpu", os.cpu_count())
    assert resolve_device("cpu", 8, dev=dev) == ("cpu", 8)


def test_an_ascend_node_is_found_and_its_visible_devices_counted(
    dev: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(8):
        (dev / f"davinci{index}").touch()
    (dev / "davinci_manager").touch()
    assert resolve_device("auto", dev=dev) == ("npu", 8)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,3")
    assert resolve_device("npu", dev=dev) == ("npu", 2)
    assert resolve_device("cpu", dev=dev) == ("cpu", os.cpu_count())


def test_asking_for_what_is_not_there_says_so(dev: Path) -> None:
    with pytest.raises(ConfigError, match="no npu device is visible"):
        resolve_device("npu", dev=dev)
