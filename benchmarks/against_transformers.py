"""Output tokens per second at 8 requests against `transformers` with batch 8, in turns.

128 tokens in, 64 out, fp32, PP 2 on two cores. Expected: `transformers` 32
tokens/s with two threads; a stage of 15 layers takes about 100 ms for 4 rows, so
two stages at work on 4 rows each give about 30: a ratio near 0.9. The limit is 0.7.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time

from benchmarks.served import DEMO_MODEL, served
from stagemesh import AsyncClient

NUM_REQUESTS = 8
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
ROUNDS = 3
LIMIT_RATIO = 0.7

_TRANSFORMERS = """
import sys, time, torch
from transformers import AutoModelForCausalLM
path, n, prompt, output = sys.argv[1], *map(int, sys.argv[2:])
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
ids = torch.tensor([[(7 * i + 13 * j) % 40000 + 5 for j in range(prompt)] for i in range(n)])
def run(output):
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=output,
                       min_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
run(4)
for line in sys.stdin:
    started = time.monotonic()
    run(output)
    print(time.monotonic() - started, flush=True)
"""


def main() -> None:
    """Prints tokens per second of both, round by round, and the ratio."""
    from services.models.resolve import resolve_model

    path = str(resolve_model(DEMO_MODEL))
    sizes = [str(size) for size in (NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS)]
    command = [sys.executable, "-c", _TRANSFORMERS, path, *sizes]
    tokens = NUM_REQUESTS * OUTPUT_TOKENS
    ratios = []
    with (
        served(DEMO_MODEL, "-pp", "2") as mesh,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        ) as oracle,
    ):
        if oracle.stdin is None or oracle.stdout is None:
            raise RuntimeError("the transformers process has no pipes")
        asyncio.run(_ask_all(mesh.grpc_address, 4))
        for round_number in range(ROUNDS):
            # In turns: each has the machine to itself, and drift hits both alike.
            print("go", file=oracle.stdin, flush=True)
            theirs = tokens / float(oracle.stdout.readline())
            started = time.monotonic()
            asyncio.run(_ask_all(mesh.grpc_address, OUTPUT_TOKENS))
            ours = tokens / (time.monotonic() - started)
            ratios.append(ours / theirs)
            print(
                f"round {round_number + 1}: stagemesh {ours:.1f} tokens/s, transformers "
                f"{theirs:.1f} tokens/s, ratio {ratios[-1]:.2f}",
                flush=True,
            )
        oracle.stdin.close()
    print(f"median ratio {statistics.median(ratios):.2f}; limit {LIMIT_RATIO}")


async def _ask_all(address: str, max_tokens: int) -> None:
    async with AsyncClient(address) as client:
        await asyncio.gather(
            *(
                client.generate(
                    token_ids=[(7 * i + 13 * j) % 40000 + 5 for j in range(PROMPT_TOKENS)],
                    temperature=0,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    timeout=300,
                )
                for i in range(NUM_REQUESTS)
            )
        )
