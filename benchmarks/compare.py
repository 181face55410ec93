"""Stagemesh, vLLM and `transformers` on the same prompts, in turns, and how far each is from what
the machine's matrix products allow (benchmarks/machine_limit.py).

    python -m benchmarks.compare [--requests 1,8,32] [--rounds 3] [--vllm-python PATH]

SmolLM2-135M in fp32, 128 tokens in and 64 out. Stagemesh and vLLM through their servers with PP 2
and the client of `stagemesh bench serve`, `transformers` as one static batch with all cores.
vLLM needs an environment of its own (benchmarks/make_vllm_venv.sh) and is left out where
neither --vllm-python nor STAGEMESH_VLLM_PYTHON names it.

The order of the systems turns around with every round, and a ratio is taken within a round, so
that the machine's drift and its other users hit all alike; the median over the rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.machine_limit import (
    MachineMeter,
    MachineRates,
    ModelWeights,
    limit_tokens_per_second,
)
from benchmarks.served import DEMO_MODEL, served
from benchmarks.static_batch import StaticBatch
from benchmarks.vllm_served import PYTHON_VARIABLE, VllmServed
from services.bench.endpoint import Endpoint
from services.bench.prompts import make_requests
from services.bench.serve import measure
from services.bench.settings import BenchSettings
from services.models.resolve import resolve_model
from services.topology.families import read_model_facts

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
REQUESTS = (1, 8, 32)
ROUNDS = 3
OURS, VLLM, TRANSFORMERS, LIMIT = "Stagemesh", "vLLM", "transformers", "limit"
WANTED = {
    (VLLM, 1): 1.8,
    (VLLM, 8): 2.0,
    (VLLM, 32): 2.0,
    (TRANSFORMERS, 32): 1.6,
    (LIMIT, 32): 0.65,
}
"""Least ratio of Stagemesh's tokens per second to another's, by the number of requests."""
FORMULA = """limit = N x O / (N x P x 2 W / G + O x max(N x 2 (W + H) / G, 4 (W + H) / B))
  N requests of P = 128 and O = 64 tokens, W = {W:.1f} M weights of the layers, H = {H:.1f} M of the
  head; G and B as measured on all cores, for large fp32 matrix products and for reading memory:"""


def settings(url: str, num_requests: int, seed: int) -> BenchSettings:
    """All requests at once; every round has prompts of its own."""
    return BenchSettings(
        base_url=url,
        num_prompts=num_requests,
        random_input_len=PROMPT_TOKENS,
        random_output_len=OUTPUT_TOKENS,
        ignore_eos=True,
        seed=seed,
    )


def through_server(url: str, num_requests: int, seed: int) -> float:
    """Output tokens per second. Raises `RuntimeError` where not every token came."""
    _, result = asyncio.run(measure(settings(url, num_requests, seed)))
    if result.total_output_tokens != num_requests * OUTPUT_TOKENS or not result.exact_prompts:
        raise RuntimeError(f"{url}: {result.total_output_tokens} tokens, errors {result.errors}")
    return result.output_throughput


def prompts_of(url: str, num_requests: int, seed: int) -> list[list[int]]:
    """The prompts that `through_server` sends."""

    async def ask() -> list[list[int]]:
        some = settings(url, num_requests, seed)
        endpoint = Endpoint(some)
        rng = random.Random(f"prompts {seed}")
        try:
            model = await endpoint.model()
            requests, _ = await make_requests(endpoint, some, model, num_requests, rng)
        finally:
            endpoint.close()
        return [json.loads(request.body)["prompt"] for request in requests]

    return asyncio.run(ask())


def weights_of(model_path: Path) -> ModelWeights:
    """The matrices of the layers from the checkpoint's headers, the head from its config."""
    facts = read_model_facts(model_path)
    head = facts.vocab_size * facts.hidden_size
    return ModelWeights(layers=_layer_weights(model_path), head=head)


def _layer_weights(model_path: Path) -> int:
    count = 0
    for file in model_path.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, tensor in header.items():
            if ".layers." in name and len(tensor.get("shape", ())) == 2:
                rows, columns = tensor["shape"]
                count += rows * columns
    return count


def main(arguments: Sequence[str] = ()) -> None:
    """Prints every round, then the medians with what is wanted."""
    # Else the servers would stay: they are in sessions of their own.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options = _options(arguments)
    model_path = resolve_model(DEMO_MODEL)
    weights = weights_of(Path(model_path))
    meter = MachineMeter()
    with ExitStack() as stack:
        stack.callback(meter.close)
        vllm: VllmServed | None = None
        if options.vllm_python:
            vllm = stack.enter_context(VllmServed(options.vllm_python, str(model_path), DEMO_MODEL))
            print(f"vLLM ready after {vllm.ready_seconds:.0f} s", flush=True)
        batch = stack.enter_context(StaticBatch(str(model_path)))
        mesh = stack.enter_context(served(DEMO_MODEL, "-pp", "2", "--max-model-len", "2048"))
        print(f"Stagemesh ready after {mesh.ready_seconds:.1f} s", flush=True)

        measured: list[MachineRates] = []

        def limit(num_requests: int, seed: int) -> float:
            measured.append(meter.measure())
            sizes = num_requests, PROMPT_TOKENS, OUTPUT_TOKENS
            return limit_tokens_per_second(weights, measured[-1], *sizes)

        def transformers(num_requests: int, seed: int) -> float:
            prompts = prompts_of(mesh.url, num_requests, seed)
            return num_requests * OUTPUT_TOKENS / batch.seconds(prompts, OUTPUT_TOKENS)

        def through_vllm(num_requests: int, seed: int) -> float:
            assert vllm is not None
            with vllm.running():
                return through_server(vllm.url, num_requests, seed)

        systems: dict[str, Callable[[int, int], float]] = {
            LIMIT: limit,
            OURS: lambda num_requests, seed: through_server(mesh.url, num_requests, seed),
            TRANSFORMERS: transformers,
        }
        if vllm is not None:
            systems[VLLM] = through_vllm
        for action in systems.values():
            action(2, 0)  # what the first call of each has to do once
        for num_requests in options.requests:
            _report(num_requests, _rounds(systems, num_requests, options.rounds))
    print(FORMULA.format(W=weights.layers / 1e6, H=weights.head / 1e6))
    flops = statistics.median(rates.flops_per_second for rates in measured) / 1e9
    read = statistics.median(rates.bytes_per_second for rates in measured) / 1e9
    print(f"  G = {flops:.0f} GFLOP/s, B = {read:.1f} GB/s (medians of {len(measured)})")
    if not options.vllm_python:
        print(f"vLLM was left out: {PYTHON_VARIABLE} names no interpreter")


def _rounds(
    systems: dict[str, Callable[[int, int], float]], num_requests: int, rounds: int
) -> list[dict[str, float]]:
    found = []
    names = list(systems)
    for number in range(1, rounds + 1):
        order = names if number % 2 else names[::-1]
        speeds = {name: systems[name](num_requests, 100 * num_requests + number) for name in order}
        found.append(speeds)
        shown = ", ".join(f"{name} {speeds[name]:.1f}" for name in names)
        print(f"{num_requests:2} requests, round {number}, tokens/s: {shown}", flush=True)
    return found


def _report(num_requests: int, rounds: Sequence[dict[str, float]]) -> None:
    speeds = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    print(f"{num_requests:2} requests, medians: Stagemesh {speeds[OURS]:.1f} tokens/s")
    for name in (VLLM, TRANSFORMERS, LIMIT):
        if name not in speeds:
            continue
        ratio = statistics.median(one[OURS] / one[name] for one in rounds)
        wanted = WANTED.get((name, num_requests))
        verdict = ""
        if wanted is not None:
            verdict = f" (at least {wanted}: {'met' if ratio >= wanted else 'MISSED'})"
        print(f"    {name:12} {speeds[name]:7.1f} tokens/s, ratio {ratio:.2f}{verdict}")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare")
    parser.add_argument("--vllm-python", default=os.environ.get(PYTHON_VARIABLE), metavar="PATH")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    parser.add_argument(
        "--requests",
        type=lambda text: tuple(int(item) for item in text.split(",")),
        default=REQUESTS,
        metavar="N,N,...",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
