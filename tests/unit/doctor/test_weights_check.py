"""`--deep`: which file differs, with both hashes."""

from __future__ import annotations

from services.doctor.findings import Outcome
from services.doctor.weights_check import check_weights_equal, check_weights_here
from services.models.content_hash import FileHash, HashProgress
from stagemesh.v1 import control_pb2

A, B = "a" * 64, "b" * 64
OURS = HashProgress(10, 10, (FileHash("one.safetensors", A), FileHash("two.safetensors", A)), "")


def theirs(**hashes: str) -> control_pb2.ContentHash:
    files = [
        control_pb2.FileHash(name=f"{name}.safetensors", sha256=sha256)
        for name, sha256 in hashes.items()
    ]
    return control_pb2.ContentHash(files=files, hashed_bytes=5, total_bytes=10)


def test_equal_weights() -> None:
    (finding,) = check_weights_equal(OURS, theirs(one=A, two=A), "head-host")
    assert finding.outcome is Outcome.OK
    assert finding.what == "every byte of 2 files (10 B) is equal here and on head-host"


def test_files_that_differ_or_are_missing_are_named() -> None:
    found = list(check_weights_equal(OURS, theirs(one=B, three=A), "head-host"))
    assert {finding.outcome for finding in found} == {Outcome.FAILED}
    assert [finding.what.partition(" differs")[0] for finding in found] == [
        "one.safetensors",
        "three.safetensors",
        "two.safetensors",
    ]
    assert "head-host has bbbbbbbbbbbb... and this node has aaaaaaaaaaaa..." in found[0].what
    assert "this node has no such file" in found[1].what


def test_a_hash_that_was_not_finished() -> None:
    (finding,) = check_weights_equal(OURS, theirs(), "head-host")
    assert finding.outcome is Outcome.FAILED and "5 of 10 bytes read" in finding.what
    gone = control_pb2.ContentHash(error="there is no model here to hash")
    (finding,) = check_weights_equal(OURS, gone, "head-host")
    assert "there is no model here" in finding.what
    broken = HashProgress(0, 0, (), "the weights cannot be read: gone")
    for findings in (
        check_weights_equal(broken, theirs(one=A), "head-host"),
        check_weights_here(broken),
    ):
        (finding,) = findings
        assert (finding.outcome, finding.what) == (Outcome.FAILED, broken.error)


def test_without_a_head_the_whole_hash_is_shown() -> None:
    (finding,) = check_weights_here(OURS)
    assert finding.outcome is Outcome.OK
    assert f"one.safetensors {A}" in finding.what
