"""A mesh of two nodes over mutual TLS: it serves, and whoever has no place in it is told why."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.rpc.roles import Role
from stagemesh import Client, NotPermitted, PipelineUnavailable, TLSConfig
from tests.certificates import Pki
from tests.mesh_process import MeshProcess
from tests.simulated_mesh import expected_outputs, make_model, prompts_of

LAYOUT = ("--nnodes", "2", "-tp", "1", "-pp", "2", "--device", "sim")


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, pki: Pki) -> Iterator[MeshProcess]:
    model = make_model(tmp_path_factory.mktemp("tls") / "model")
    tls = ("--tls-dir", str(pki.tls_dir))
    node = [*LAYOUT, "--node-rank", "1", *tls]
    with MeshProcess(model, *LAYOUT, "--master-port", "0", *tls, nodes=[node]) as mesh:
        yield mesh


def sdk(pki: Pki, role: Role) -> TLSConfig:
    files = pki.files(role)
    return TLSConfig(files.ca, files.certificate, files.private_key)


def test_it_serves_over_tls_only(mesh: MeshProcess, pki: Pki) -> None:
    prompts = prompts_of(2, 5)
    with Client(mesh.grpc_address, tls=sdk(pki, Role.CLIENT)) as client:
        answers = [
            list(client.generate(token_ids=prompt, max_tokens=6, ignore_eos=True).token_ids)
            for prompt in prompts
        ]
    assert answers == expected_outputs(prompts, 6)
    assert httpx.get(f"{mesh.url}/ready").status_code == 200
    with (
        Client(mesh.grpc_address, max_retries=0, timeout=5) as client,
        pytest.raises(PipelineUnavailable),
    ):
        client.models()
    with (
        Client(mesh.grpc_address, tls=sdk(pki, Role.STAGE_WORKER), timeout=5) as client,
        pytest.raises(NotPermitted, match="is for role client"),
    ):
        client.models()


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def doctor(mesh: MeshProcess, *flags: object) -> tuple[int, dict[str, str]]:
    """Exit code, and what the checks of the head and of TLS say."""
    done = command("doctor", *mesh.join_flags, "--json", "--port", 0, "--grpc-port", 0, *flags)
    assert done.stderr == ""
    findings = json.loads(done.stdout)["findings"]
    return done.returncode, {f["check"]: f["what"] for f in reversed(findings)}


def test_an_operators_doctor_looks_at_it(mesh: MeshProcess, pki: Pki) -> None:
    code, said = doctor(mesh, "--tls-dir", pki.tls_dir)
    assert code == 0, said
    assert "role operator, until" in said["tls"]
    assert "answers at" in said["head"] and "progress" in said


def test_a_doctor_without_a_place_is_told_why(mesh: MeshProcess, pki: Pki, tmp_path: Path) -> None:
    code, said = doctor(mesh)
    assert code == 1 and "it speaks TLS, and this side does not" in said["head"]
    other = Pki(tmp_path)
    code, said = doctor(mesh, "--tls-dir", other.tls_dir)
    assert code == 1 and "its certificate is refused: it was signed by another CA" in said["head"]
    # It trusts the mesh, and the mesh does not trust it.
    other.files(Role.OPERATOR).ca.write_bytes(
        pki.files(Role.OPERATOR).ca.read_bytes() + other.files(Role.OPERATOR).ca.read_bytes()
    )
    code, said = doctor(mesh, "--tls-dir", other.tls_dir)
    assert code == 1 and "it refuses our certificate: it trusts another CA" in said["head"]
    files = other.files(Role.OPERATOR)
    worker = pki.files(Role.STAGE_WORKER)
    files.certificate.write_bytes(worker.certificate.read_bytes())
    files.private_key.write_bytes(worker.private_key.read_bytes())
    code, said = doctor(mesh, "--tls-dir", other.tls_dir)
    assert code == 1 and "has role stage-worker, not operator" in said["tls"]
    assert "was not asked" in said["head"]


def test_a_worker_without_a_place_says_why_and_leaves(
    mesh: MeshProcess, pki: Pki, tmp_path: Path
) -> None:
    worker = ("stage-worker", *mesh.join_flags, "--device", "sim", "--join-timeout-seconds", 20)
    for flags, words in (
        ((), "it speaks TLS, and this side does not"),
        (("--tls-dir", Pki(tmp_path).tls_dir), "it was signed by another CA"),
    ):
        done = command(*worker, *flags)
        assert done.returncode == 1
        assert "no TLS connection to the head" in done.stderr and words in done.stderr
