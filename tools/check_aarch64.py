"""Checks that every extra resolves to aarch64 wheels at the pinned versions.

Ascend servers are usually aarch64. Both distributions are built, then pip
resolves `stagemesh[...]` for manylinux aarch64 from wheels alone, without
installing anything. Fails (exit code 1) when a wheel is missing, when a
resolved package has no pin in constraints.txt, or when a dependency that only
aarch64 has was not looked at: pip evaluates environment markers for the
machine that it runs on, so those are evaluated here a second time.

    python -m tools.check_aarch64 [--python-version 3.11] [--constraints FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("gateway", "bench", "worker", "convert", "ray", "npu", "certs")
# openEuler 22.03 and later and Ubuntu 20.04 and later have at least glibc 2.28. pip
# does not add the older tags by itself once a platform is named.
GLIBC_MINORS = range(17, 29)
PLATFORMS = (*(f"manylinux_2_{minor}_aarch64" for minor in GLIBC_MINORS), "manylinux2014_aarch64")
RESOLVE_TIMEOUT_SECONDS = 540.0
OWN = ("stagemesh", "stagemesh-server")


@dataclass(frozen=True, slots=True)
class Resolved:
    """One package as pip would take it."""

    name: str
    version: str
    requires: tuple[str, ...]
    wheel: str


def build_wheels(directory: Path) -> None:
    """Builds both distributions into `directory`."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "-w", str(directory), str(ROOT / "stagemesh"), str(ROOT)]
    subprocess.run(command, check=True, timeout=RESOLVE_TIMEOUT_SECONDS)


def resolve(
    requirement: str, *, python_version: str, constraints: Path, links: Path
) -> tuple[list[Resolved], str]:
    """What pip would install, and its complaint where it cannot (then the list is empty)."""
    report = links / "report.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pip", "install", "--dry-run"]
    command += ["--report", str(report), "--target", str(links / "target")]
    command += ["--only-binary=:all:", "--python-version", python_version]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    command += ["--find-links", str(links), "-c", str(constraints), requirement]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RESOLVE_TIMEOUT_SECONDS, check=False
    )
    if done.returncode != 0:
        return [], _complaint(done)
    items = json.loads(report.read_text())["install"]
    return [
        Resolved(
            name=canonicalize_name(item["metadata"]["name"]),
            version=item["metadata"]["version"],
            requires=tuple(item["metadata"].get("requires_dist", ())),
            wheel=item["download_info"]["url"].rsplit("/", 1)[-1],
        )
        for item in items
    ], ""


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    """What pip names as the cause, from both of its outputs; never empty."""
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    _, _, cause = done.stdout.partition("The conflict is caused by:")
    errors += [line.strip() for line in cause.partition("\n\n")[0].splitlines() if line.strip()]
    return "\n".join(errors) or done.stderr or f"pip failed with exit code {done.returncode}"


def pinned(constraints: Path) -> dict[str, str]:
    """Name to version of every line `name==version`."""
    pins = {}
    for line in constraints.read_text().splitlines():
        text = line.split("#", 1)[0].strip()
        if text:
            name, _, version = text.partition("==")
            pins[canonicalize_name(name)] = version
    return pins


def problems(packages: Sequence[Resolved], pins: dict[str, str], python_version: str) -> list[str]:
    """What is wrong with a resolved set, one line each."""
    found = [
        f"{package.name} {package.version} has no pin in constraints.txt"
        for package in packages
        if package.name not in OWN and package.name not in pins
    ]
    names = {package.name for package in packages}
    target = {"platform_machine": "aarch64", "python_version": python_version, "extra": ""}
    for package in packages:
        if package.name in OWN:
            continue
        for text in package.requires:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            if requirement.marker is None or name in names:
                continue
            if requirement.marker.evaluate(target):
                found.append(f"{package.name} needs {text} on aarch64, which was not resolved")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check_aarch64", description=__doc__)
    parser.add_argument("--python-version", default="3.11")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="stagemesh-aarch64-") as name:
        links = Path(name)
        build_wheels(links)

        def resolve_extras(extras: Sequence[str]) -> tuple[list[Resolved], str]:
            return resolve(
                f"stagemesh[{','.join(extras)}]",
                python_version=options.python_version,
                constraints=options.constraints.resolve(),
                links=links,
            )

        packages, complaint = resolve_extras(EXTRAS)
        if complaint:
            for extra in EXTRAS:
                _, complaint_of_extra = resolve_extras((extra,))
                verdict = complaint_of_extra or "resolves"
                print(f"[{extra}] {verdict}")
            print("check-aarch64: not every extra resolves", file=sys.stderr)
            return 1
    found = problems(packages, pinned(options.constraints), options.python_version)
    for package in packages:
        print(f"{package.name}=={package.version}  {package.wheel}")
    for line in found:
        print(f"check-aarch64: {line}", file=sys.stderr)
    print(f"check-aarch64: {len(packages)} packages for {', '.join(EXTRAS)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
