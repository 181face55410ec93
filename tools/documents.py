"""`python -m tools.documents COMMAND`: the pages of docs/ that are made from the code's tables.

    generate   write them
    drift      fail where one is not what `generate` would write

Exit code 1 means findings, one a line on stdout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from services.topology.compatibility import RULES
from services.topology.rule import Rule

_COMPATIBILITY_HEAD = """\
# What cannot be combined

Made from the table `RULES` in `services/topology/compatibility.py` by `make docs`; change it there.

Every row is refused at start, by the head, by every other node and by `stagemesh plan`, before a
model is loaded: one line with what was asked for, the reason, what to do and the rule's name. What
is accepted is done; nothing is ignored in silence.

```text
stagemesh: error: --prefill-context-parallel-size 2 with --pipeline-parallel-size 4: [...]
```

## What is looked at

"""
_FLAGS = (
    ("--prefill-context-parallel-size N", "1"),
    (
        "--additional-config JSON",
        "vLLM Ascend's object, with `xlite_graph_config` and `sparse_kv_offload_config` that are "
        "not `enabled`; any other key is refused by its name",
    ),
    ("--kv-transfer-config JSON", "vLLM's object, without a `kv_connector`"),
    (
        "--interconnect auto|hccs|roce",
        "what joins the NPUs of different nodes, as you state it; `auto` states nothing. It is "
        "checked against the rules and between the nodes, which must not contradict each other. "
        "It configures nothing: HCCL chooses its links by its own variables",
    ),
)
_RULES_HEAD = """\
In a YAML file (`--config`) they have the same names, and an object may be a mapping. JSON that
cannot be read is refused with line and column, a key that is there twice or not known by its name.

The rules also look at `--tensor-parallel-size`, `--pipeline-parallel-size`, `--data-parallel-size`,
`--nnodes`, `--device` and the model's `config.json`.

## Rules

The first rule that is broken is explained, the others are named.

"""


def compatibility_page(rules: Sequence[Rule] = RULES) -> str:
    """docs/compatibility.md."""
    flags = _table(("flag", "accepted"), [(f"`{flag}`", what) for flag, what in _FLAGS])
    rows = []
    for rule in rules:
        reason = rule.reason
        if rule.source is not None:
            reason += f" ([vLLM Ascend]({rule.source}))"
        rows.append((f"`{rule.name}`", rule.condition, reason, rule.remedy))
    table = _table(("rule", "refused", "because", "what to do"), rows)
    return f"{_COMPATIBILITY_HEAD}{flags}\n{_RULES_HEAD}{table}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


PAGES: Mapping[str, Callable[[], str]] = {"docs/compatibility.md": compatibility_page}


def generate(root: Path) -> tuple[str, ...]:
    """Writes every page."""
    for name, page in PAGES.items():
        (root / name).write_text(page(), encoding="utf-8")
    return ()


def drift(root: Path) -> tuple[str, ...]:
    """Pages that are missing, changed by hand or out of date."""
    findings = []
    for name, page in PAGES.items():
        path = root / name
        if not path.is_file():
            findings.append(f"{name} is missing; run `make docs`")
        elif path.read_text("utf-8") != page():
            findings.append(f"{name} differs from what its table gives; run `make docs`")
    return tuple(findings)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    commands = {"generate": generate, "drift": drift}
    parser = argparse.ArgumentParser(prog="python -m tools.documents")
    parser.add_argument("command", choices=tuple(commands))
    arguments = parser.parse_args(argv)
    findings = commands[arguments.command](Path(__file__).resolve().parents[1])
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
