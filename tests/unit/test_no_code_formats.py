"""Nothing that is read from a socket or a file can run code: the formats that could are not used.

By reading our own source: what is imported and what is called. docs/security.md says what
remains outside (Ray's own protocol).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.unit.test_architecture import (
    OWN_PACKAGES,
    REPOSITORY,
    imports_of,
    module_name,
    own_files,
)

MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve",
    "jsonpickle", "multiprocessing", "torch.multiprocessing", "torch.distributed.rpc",
}  # fmt: skip
"""They unpickle what comes over a pipe or a socket, or out of a file."""
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list", "rpc_sync", "rpc_async",
    "unsafe_load", "full_load", "unsafe_load_all", "full_load_all",
    "load_inline",
}  # fmt: skip
"""Of any object: the collectives for objects pickle, the YAML functions make objects."""


def found_in(source: str, module: str) -> Iterator[str]:
    """Everything in a file that could run what it reads."""
    for item in imports_of(source, module):
        if any(item.module == name or item.module.startswith(f"{name}.") for name in MODULES):
            yield f"{item.line}: imports {item.module}"
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        owner, _, name = called.rpartition(".")
        keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if name in CALLS or called in BUILTINS:
            yield f"{node.lineno}: calls {called}"
        if owner == "torch" and name == "load" and keywords.get("weights_only") != "True":
            yield f"{node.lineno}: torch.load without weights_only=True"
        if owner in ("np", "numpy") and name == "load" and keywords.get("allow_pickle") == "True":
            yield f"{node.lineno}: {called} with allow_pickle"
        if owner == "yaml" and name.startswith("load"):
            loader = keywords.get("Loader") or (
                ast.unparse(node.args[1]) if len(node.args) > 1 else ""
            )
            if loader not in ("yaml.SafeLoader", "yaml.CSafeLoader") and not (
                f"class {loader}(yaml.SafeLoader)" in source and loader
            ):
                yield f"{node.lineno}: {called} with {loader or 'no loader'}"
        if keywords.get("trust_remote_code") == "True":
            yield f"{node.lineno}: {called} runs code of a checkpoint"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from multiprocessing import connection",
        "import torch\ntorch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.FullLoader)",
        "yaml.unsafe_load(text)",
        "dist.broadcast_object_list(things)",
        "eval(text)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_it_is_found(source: str) -> None:
    assert list(found_in(source, "services.x"))


@pytest.mark.parametrize(
    "source",
    [
        "import pickling_nothing",
        "re.compile(text)",
        "model.eval()",
        "torch.load(path, weights_only=True)",
        "class _L(yaml.SafeLoader):\n    pass\nyaml.load(text, _L)",
        "yaml.safe_load(text)",
        "from safetensors import safe_open",
    ],
)
def test_what_is_harmless_is_not(source: str) -> None:
    assert list(found_in(source, "services.x")) == []


def test_nothing_of_ours_runs_what_it_reads() -> None:
    found = []
    for path in own_files(*OWN_PACKAGES):
        for what in found_in(path.read_text("utf-8"), module_name(path)):
            found.append(f"{path.relative_to(REPOSITORY)}:{what}")
    assert not found, "\n".join(found)


def test_there_is_source_to_look_at() -> None:
    assert len(own_files(*OWN_PACKAGES)) > 100
