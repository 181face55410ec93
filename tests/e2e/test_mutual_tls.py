"""A mesh of two nodes over mutual TLS: it serves, and whoever has no place in it is told why."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.api_keys import add_key, read_keys
from services.rpc.roles import Role
from stagemesh import Client, NotAuthenticated, NotPermitted, PipelineUnavailable, TLSConfig
from tests.certificates import Pki
from tests.mesh_process import MeshProcess
from tests.simulated_mesh import expected_outputs, make_model, prompts_of

OWN_KEY = "canary-of-the-environment-5b1f"
HUB_TOKEN = "hf_canary_of_the_hub_91e2"
WRONG_KEY = "canary-that-is-wrong-77aa"
PROMPT = "canary-of-a-prompt-c0de"
LAYOUT = ("--nnodes", "2", "-tp", "1", "-pp", "2", "--device", "sim")


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def stored_key(directory: Path) -> str:
    return add_key(directory / "keys", "client")


@pytest.fixture(scope="module")
def mesh(directory: Path, pki: Pki, stored_key: str) -> Iterator[MeshProcess]:
    """All that --require-tls asks for, and keys by every way but the command line."""
    model = make_model(directory / "model")
    tls = ("--tls-dir", str(pki.tls_dir), "--require-tls")
    files = pki.files(Role.GATEWAY)
    doors = (
        *("--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.private_key)),
        *("--api-key-file", str(directory / "keys"), "--step-trace", str(directory / "trace")),
    )
    node = [*LAYOUT, "--node-rank", "1", *tls]
    environment = {
        "STAGEMESH_API_KEY": OWN_KEY,
        "HF_TOKEN": HUB_TOKEN,
        "STAGEMESH_LOG_LEVEL": "DEBUG",
    }
    with MeshProcess(
        model,
        *(*LAYOUT, "--master-port", "0", *tls, *doors),
        nodes=[node],
        environment=environment,
    ) as mesh:
        yield mesh


@pytest.fixture
def http(mesh: MeshProcess, pki: Pki, stored_key: str) -> Iterator[httpx.Client]:
    verify = ssl.create_default_context(cafile=pki.files(Role.CLIENT).ca)
    headers = {"authorization": f"Bearer {stored_key}"}
    with httpx.Client(base_url=mesh.url, verify=verify, headers=headers, timeout=10) as http:
        yield http


def sdk(pki: Pki, role: Role) -> TLSConfig:
    files = pki.files(role)
    return TLSConfig(files.ca, files.certificate, files.private_key)


def test_it_serves_over_tls_only(
    mesh: MeshProcess, pki: Pki, http: httpx.Client, stored_key: str
) -> None:
    prompts = prompts_of(2, 5)
    with Client(mesh.grpc_address, tls=sdk(pki, Role.CLIENT), api_key=stored_key) as client:
        answers = [
            list(client.generate(token_ids=prompt, max_tokens=6, ignore_eos=True).token_ids)
            for prompt in prompts
        ]
    assert answers == expected_outputs(prompts, 6)
    assert mesh.url.startswith("https://")
    assert http.get("/ready").status_code == 200
    assert http.get("/v1/models").status_code == 200
    with (
        Client(mesh.grpc_address, max_retries=0, timeout=5) as client,
        pytest.raises(PipelineUnavailable),
    ):
        client.models()
    with (
        Client(
            mesh.grpc_address, tls=sdk(pki, Role.STAGE_WORKER), api_key=stored_key, timeout=5
        ) as client,
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


def test_secrets_are_nowhere_to_be_seen(
    mesh: MeshProcess, pki: Pki, http: httpx.Client, stored_key: str, directory: Path
) -> None:
    """Keys, right and wrong, prompts and private keys: not in logs, answers, metrics, traces,
    process titles, nor in what children inherit."""
    body = {"model": mesh.model_name, "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}
    own, wrong = ({"authorization": f"Bearer {key}"} for key in (OWN_KEY, WRONG_KEY))
    assert http.post("/v1/completions", json=body, headers=own).status_code == 200
    answers = [
        http.post("/v1/completions", json=body, headers=wrong),
        http.post("/v1/completions", json=body | {"temperature": 9}),
        http.post("/nothing", json=body),
    ]
    assert [answer.status_code for answer in answers] == [401, 400, 404]
    with (
        Client(mesh.grpc_address, tls=sdk(pki, Role.CLIENT), api_key=WRONG_KEY) as client,
        pytest.raises(NotAuthenticated) as refused,
    ):
        client.models()
    answers += [http.get(path) for path in ("/v1/mesh", "/metrics", "/version", "/openapi.json")]
    seen = {
        "answers": "".join(answer.text for answer in answers) + str(refused.value),
        "log": mesh.log(),
        "stdout": mesh.output,
        "trace": (directory / "trace").read_text(),
    }
    gateway = mesh.process.pid
    for process in mesh.tree():
        seen[f"title of {process.pid}"] = " ".join(process.cmdline())
        if process.pid != gateway:
            # A process's own environment is what it was started with, and readable for its user.
            seen[f"environment of {process.pid}"] = str(process.environ())
    key_lines = [
        line
        for path in (*pki.tls_dir.glob("*.key"), pki.ca / "ca.key")
        for line in path.read_text().splitlines()
        if "PRIVATE KEY" not in line
    ]
    digests = [key.digest.hex() for key in read_keys(directory / "keys")]
    assert len(seen) > 8 and "request done" in seen["log"] and key_lines
    for secret in (OWN_KEY, HUB_TOKEN, WRONG_KEY, stored_key, PROMPT, *key_lines, *digests):
        for where, text in seen.items():
            assert secret not in text, f"{secret} is in the {where}"


def test_what_dies_takes_no_request_with_it(mesh: MeshProcess, http: httpx.Client) -> None:
    """A rank comes back behind its worker's channel; a worker joins anew, and is dialled anew."""
    body = {"model": mesh.model_name, "prompt": "a", "max_tokens": 3, "ignore_eos": True}
    for process in (mesh.ranks()[0], *mesh.workers()):
        process.kill()
        assert http.post("/v1/completions", json=body, timeout=30).status_code == 200


def test_a_doctor_listens_in_the_place_of_a_head(pki: Pki, directory: Path) -> None:
    """With the gateway's certificate; the one who asks shows the operator's."""
    tls = ("--tls-dir", str(pki.tls_dir))
    ports = ("--master-port", "0", "--port", "0", "--grpc-port", "0")
    listening = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "doctor", *LAYOUT, *tls, *ports, "--listen"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert listening.stderr is not None
    with listening.stderr:
        try:
            port = listening.stderr.readline().partition(";")[0].rpartition(":")[2]
            asking = ("doctor", "--master-port", port, "--json", *ports[2:])
            for flags, answered in ((tls, True), ((), False)):
                said = json.loads(command(*asking, *flags).stdout)["findings"]
                heads = [finding["what"] for finding in said if finding["check"] == "head"]
                assert ("a doctor on" in heads[0]) is answered, heads
        finally:
            listening.kill()
            listening.wait(10)
