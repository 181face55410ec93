"""The structure that docs/structure.md promises, held by the code itself.

`stagemesh` <- `services` <- `gateway | stage_worker` <- `services/cli` (lazily);
torch only below `stage_worker`; no file that nobody can read at a sitting; no
service that listens to the world unless it is told to.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from services.config import ServeConfig, StageWorkerConfig

REPOSITORY = Path(__file__).resolve().parents[2]
OWN_PACKAGES = ("stagemesh", "services", "gateway", "stage_worker")
NOT_INSTALLED = ("tools", "tests", "benchmarks")
MAY_IMPORT = {
    "stagemesh": {"stagemesh"},
    "services": {"stagemesh", "services"},
    "gateway": {"stagemesh", "services", "gateway"},
    "stage_worker": {"stagemesh", "services", "stage_worker"},
}
# The command line stands above everything, and reaches down only when a command runs.
COMMAND_LINE = "services.cli"
HEAVY = {"torch", "torch_npu", "transformers", "gguf"}
# A program of its own that `model fetch` starts; it must need torch only when it runs.
CONVERTER = "services.models.convert"
MAX_LINES = 500


class Import(NamedTuple):
    """One imported module, by its absolute name."""

    line: int
    module: str
    lazy: bool
    """Inside a function, so that importing the file does not import it."""


def imports_of(source: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """Every import in a file, relative ones resolved against the file's own module."""
    package = module if is_package else module.rpartition(".")[0]

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(child.lineno, alias.name, lazy)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parts = package.split(".")
                    parts = parts[: len(parts) - child.level + 1]
                    base = ".".join([*parts, base] if base else parts)
                yield Import(child.lineno, base, lazy)
                for alias in child.names:
                    yield Import(child.lineno, f"{base}.{alias.name}", lazy)
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from walk(child, lazy or inside)

    yield from walk(ast.parse(source), False)


def own_files(*packages: str) -> list[Path]:
    """Python files that people write: no stubs, no build scripts and output."""
    return sorted(
        path
        for package in packages
        for path in (REPOSITORY / package).rglob("*.py")
        if "build" not in path.relative_to(REPOSITORY).parts
        and not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
        and path.name != "setup.py"
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def all_imports() -> tuple[tuple[str, str, Import], ...]:
    """(place for a message, importing module, import) over our packages."""
    found = []
    for path in own_files(*OWN_PACKAGES):
        module = module_name(path)
        source = path.read_text()
        for item in imports_of(source, module, is_package=path.name == "__init__.py"):
            found.append((f"{path.relative_to(REPOSITORY)}:{item.line}", module, item))
    return tuple(found)


def below(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_the_import_reader_sees_all_kinds() -> None:
    source = (
        "import a.b\n"
        "from . import c\n"
        "from ..d import e\n"
        "def f():\n    import torch\n"
        "if TYPE_CHECKING:\n    from g import h\n"
    )
    assert list(imports_of(source, "services.topology.wire")) == [
        Import(1, "a.b", False),
        Import(2, "services.topology", False),
        Import(2, "services.topology.c", False),
        Import(3, "services.d", False),
        Import(3, "services.d.e", False),
        Import(5, "torch", True),
        Import(7, "g", False),
        Import(7, "g.h", False),
    ]
    (relative, *_) = imports_of("from .x import y", "services.cli", is_package=True)
    assert relative.module == "services.cli.x"


def test_there_is_something_to_look_at() -> None:
    for package in OWN_PACKAGES:
        assert own_files(package), f"package {package} is gone; this test guards nothing"


def test_imports_point_one_way() -> None:
    wrong = []
    for place, module, item in all_imports():
        package = module.partition(".")[0]
        target = item.module.partition(".")[0]
        if target in NOT_INSTALLED:
            wrong.append(f"{place}: {module} imports {item.module}, which is not installed")
        if target not in OWN_PACKAGES or target in MAY_IMPORT[package]:
            continue
        if below(module, COMMAND_LINE) and item.lazy:
            continue
        wrong.append(f"{place}: {module} must not import {item.module}")
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_the_command_line() -> None:
    wrong = [
        f"{place}: {module} imports {item.module}"
        for place, module, item in all_imports()
        if below(item.module, COMMAND_LINE) and not below(module, COMMAND_LINE)
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_only_below_stage_worker() -> None:
    wrong = [
        f"{place}: {module} imports {item.module}"
        for place, module, item in all_imports()
        if item.module.partition(".")[0] in HEAVY
        and not below(module, "stage_worker")
        and not (module == CONVERTER and item.lazy)
    ]
    assert not wrong, "\n".join(wrong)


def test_ray_is_imported_by_its_launcher_only_and_lazily() -> None:
    wrong = [
        f"{place}: {module} imports {item.module}"
        for place, module, item in all_imports()
        if item.module.partition(".")[0] == "ray"
        and not (module.startswith("services.launch.ray_") and item.lazy)
    ]
    assert not wrong, "\n".join(wrong)


def loaded_by(*modules: str) -> set[str]:
    """Top-level names in sys.modules after a fresh interpreter has imported the modules."""
    program = "import sys\n" + "".join(f"import {module}\n" for module in modules)
    program += "print('\\n'.join({name.partition('.')[0] for name in sys.modules}))"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_everything_above_the_ranks_starts_without_torch() -> None:
    modules = [
        module_name(path)
        for path in own_files("stagemesh", "services", "gateway")
        if path.name != "__main__.py"
    ]
    assert not loaded_by(*modules) & HEAVY


def test_the_stage_workers_service_starts_without_torch() -> None:
    assert not loaded_by("stage_worker.service_main") & HEAVY


@pytest.mark.parametrize("module", ["services.cli.main", "services.topology.families"])
def test_the_command_line_and_pure_functions_start_light(module: str) -> None:
    loaded = loaded_by(module)
    assert not loaded & (HEAVY | {"numpy", "fastapi", "starlette", "uvicorn", "tokenizers"})


def test_files_can_be_read_at_a_sitting() -> None:
    too_long = {
        str(path.relative_to(REPOSITORY)): lines
        for path in own_files(*OWN_PACKAGES, *NOT_INSTALLED)
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not too_long, f"over {MAX_LINES} lines, split by job: {too_long}"


def test_children_of_an_event_loop_are_killed_in_one_way() -> None:
    """By `services.launch.process.kill`, which leaves their exit code to the loop."""
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in own_files(*OWN_PACKAGES)
        if "create_subprocess_" in (source := path.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr in ("kill", "terminate", "send_signal")
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]
    assert not wrong, wrong


def weak_assertions(source: str) -> list[int]:
    """Lines of assertions that are a choice (`assert x >= 1 if a else 2` asserts 2 where a is
    false), a bare literal, or a tuple, which is always true."""
    literals = (ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.JoinedStr)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    parts = [
        (node.lineno, part)
        for node in nodes
        for part in (node.test.values if isinstance(node.test, ast.BoolOp) else [node.test])
    ]
    never = (ast.IfExp, ast.Lambda, ast.GeneratorExp, *literals)
    return [line for line, part in parts if isinstance(part, never)]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("assert x >= 0.9 if two else 0.88", [1]),
        ("assert x >= (0.9 if two else 0.88)", []),
        ("assert (x, 'why')", [1]),
        ("assert a or 0.5", [1]),
        ("assert all(x for x in y)", []),
    ],
)
def test_assertions_that_say_nothing_are_found(source: str, lines: list[int]) -> None:
    assert weak_assertions(source) == lines


def test_every_assertion_says_something() -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line}"
        for path in own_files(*OWN_PACKAGES, *NOT_INSTALLED)
        for line in weak_assertions(path.read_text())
    ]
    assert not wrong, f"assert one comparison, with the choice in parentheses inside it: {wrong}"


def test_no_service_listens_to_the_world_by_itself() -> None:
    for config in (ServeConfig(model="m"), StageWorkerConfig()):
        for field in fields(config):
            if field.name in ("host", "master_addr"):
                assert getattr(config, field.name) == "127.0.0.1", field.name
    wildcards = {"0.0.0.0", "::", "[::]", "0.0.0.0:0", "[::]:0"}
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}: {node.value}"
        for path in own_files(*OWN_PACKAGES)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in wildcards
    ]
    assert not wrong, "\n".join(wrong)
