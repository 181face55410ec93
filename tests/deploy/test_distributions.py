"""The two distributions: what is in them, what they need, and that the SDK stands alone.

Decision: docs/decisions/001-two-distributions.md
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stagemesh.version import __version__

ROOT = Path(__file__).resolve().parents[2]
SERVER_PACKAGES = ("services", "gateway", "stage_worker")
EXTRAS = ("gateway", "bench", "worker", "convert", "ray", "npu", "certs")
BUILD_INPUT = ("LICENSE", "README.md", "pyproject.toml", "setup.py", "stagemesh", *SERVER_PACKAGES)


@dataclass(frozen=True, slots=True)
class Wheel:
    """A built wheel and its metadata."""

    path: Path
    files: tuple[str, ...]
    version: str
    requires: tuple[Requirement, ...]

    def needs(self, *extras: str) -> set[str]:
        """Canonical names of what it requires, with these extras."""
        return {
            canonicalize_name(requirement.name)
            for requirement in self.requires
            if requirement.marker is None
            or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        }


def read_wheel(path: Path) -> Wheel:
    with zipfile.ZipFile(path) as archive:
        files = tuple(archive.namelist())
        (name,) = (file for file in files if file.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(name).decode())
    requires = tuple(Requirement(text) for text in fields.get_all("Requires-Dist", []))
    return Wheel(path, files, fields["Version"], requires)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    """Both wheels, built from a copy, so that no build output stays in the tree."""
    tree = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    for name in BUILD_INPUT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=ignore, symlinks=True)
        else:
            shutil.copy(source, tree / name)
    output = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "-w", str(output), str(tree / "stagemesh"), str(tree)]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return {path.name.split("-", 1)[0]: read_wheel(path) for path in output.glob("*.whl")}


def clean_environment() -> dict[str, str]:
    """Without PYTHONPATH: a relative one would put modules of the SDK's directory, where its
    build runs, before Python's own."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def top_level(files: tuple[str, ...]) -> set[str]:
    return {name.split("/", 1)[0] for name in files}


def test_the_sdk_puts_only_its_own_name_into_site_packages(wheels: dict[str, Wheel]) -> None:
    sdk = wheels["stagemesh"]
    assert top_level(sdk.files) == {"stagemesh", f"stagemesh-{__version__}.dist-info"}
    assert {"stagemesh/__init__.py", "stagemesh/py.typed"} <= set(sdk.files)
    assert {"stagemesh/v1/step_pb2.py", "stagemesh/v1/step_pb2.pyi"} <= set(sdk.files)
    assert "stagemesh/setup.py" not in sdk.files
    assert f"stagemesh-{__version__}.dist-info/licenses/LICENSE" in sdk.files


def test_the_server_holds_the_rest_with_its_data(wheels: dict[str, Wheel]) -> None:
    server = wheels["stagemesh_server"]
    info = f"stagemesh_server-{__version__}.dist-info"
    assert top_level(server.files) == {*SERVER_PACKAGES, info}
    assert "services/cli/vllm_serve_flags.txt" in server.files
    sources = {
        str(path.relative_to(ROOT))
        for package in SERVER_PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert sources <= set(server.files)


def test_one_version_for_both(wheels: dict[str, Wheel]) -> None:
    sdk, server = wheels["stagemesh"], wheels["stagemesh_server"]
    assert sdk.version == server.version == __version__
    (needs_sdk,) = (r for r in server.requires if r.name == "stagemesh")
    assert str(needs_sdk.specifier) == f"=={__version__}"
    for extra in EXTRAS:
        (server_extra,) = (r for r in sdk.requires if r.extras == {extra})
        assert server_extra.name == "stagemesh-server"
        assert str(server_extra.specifier) == f"=={__version__}"


def test_the_sdk_needs_grpc_and_protobuf_alone(wheels: dict[str, Wheel]) -> None:
    assert wheels["stagemesh"].needs() == {
        "grpcio",
        "grpcio-status",
        "googleapis-common-protos",
        "protobuf",
    }


def test_the_sdk_alone_can_be_imported(wheels: dict[str, Wheel], tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60
    )
    python = venv / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    install += ["--no-deps", "--no-index", str(wheels["stagemesh"].path)]
    subprocess.run(install, check=True, timeout=60, capture_output=True)
    # What the SDK depends on comes from this environment. A path file adds the directory
    # alone: links to this source tree that an editable install left in it do not count.
    (site,) = (venv / "lib").glob("python3*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = (
        "import importlib.util, stagemesh, stagemesh.v1.inference_pb2_grpc\n"
        "print(stagemesh.__file__)\n"
        "print([n for n in ('services', 'gateway', 'stage_worker') "
        "if importlib.util.find_spec(n)])\n"
    )
    done = subprocess.run(
        [str(python), "-c", code],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    where, generic_names = done.stdout.splitlines()
    assert Path(where).is_relative_to(venv)
    assert generic_names == "[]"


def third_party_imports(package: str) -> Iterator[tuple[str, str]]:
    """(file, top-level module) of every import that is neither ours nor Python's."""
    own = {"stagemesh", *SERVER_PACKAGES}
    for path in sorted((ROOT / package).rglob("*.py")):
        if "build" in path.parts or path.name == "setup.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            else:
                continue
            for name in names:
                top = name.split(".", 1)[0]
                if top not in own and top not in sys.stdlib_module_names:
                    yield str(path.relative_to(ROOT)), top


@pytest.mark.parametrize(
    ("package", "extras"),
    [
        # Conversion, the Hub and Ray are reached lazily, with a message that names the extra.
        ("services", ("gateway", "bench", "convert", "ray", "certs")),
        ("gateway", ("gateway",)),
        ("stage_worker", ("worker", "npu")),
        ("stagemesh", ()),
    ],
)
def test_what_is_imported_is_declared(
    wheels: dict[str, Wheel], package: str, extras: tuple[str, ...]
) -> None:
    declared = wheels["stagemesh"].needs()
    if package != "stagemesh":
        declared |= wheels["stagemesh_server"].needs(*extras)
    providers = metadata.packages_distributions()
    undeclared = {
        f"{file} imports {module}"
        for file, module in third_party_imports(package)
        # Not installed here (torch_npu): the distribution has the module's own name.
        if not {canonicalize_name(name) for name in providers.get(module, [module])} & declared
    }
    assert undeclared == set()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), "a constraint is NAME==VERSION"
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_requirement_is_pinned_and_allows_its_pin(wheels: dict[str, Wheel]) -> None:
    pinned = pins()
    for wheel in wheels.values():
        for requirement in wheel.requires:
            name = canonicalize_name(requirement.name)
            if name.startswith("stagemesh"):
                continue
            assert name in pinned, f"{name} has no pin in constraints.txt"
            assert requirement.specifier.contains(pinned[name]), str(requirement)


def test_pins_are_plain(wheels: dict[str, Wheel]) -> None:
    text = (ROOT / "constraints.txt").read_text("utf-8")
    assert "://" not in text
    assert "+" not in "".join(line for line in text.splitlines() if not line.startswith("#"))
    assert pins()["torch"] == "2.13.0"


def test_what_is_installed_is_what_is_pinned() -> None:
    """The pins are the whole transitive set: nothing here came in beside them."""
    pinned = pins()
    missing = set()
    todo = ["stagemesh-server"]
    seen = set()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for text in requires:
            requirement = Requirement(text)
            if requirement.marker and not any(
                requirement.marker.evaluate({"extra": extra})
                for extra in ({"", *EXTRAS} if name == "stagemesh-server" else {""})
            ):
                continue
            other = canonicalize_name(requirement.name)
            todo.append(other)
            if other not in pinned and not other.startswith("stagemesh"):
                missing.add(f"{other} (needed by {name})")
    assert missing == set()
