"""`transformers` with one static batch, in a process of its own that holds the machine only while
it is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

_PROGRAM = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    ids = torch.tensor(asked["prompts"])
    output = asked["output_tokens"]
    started = time.monotonic()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=output,
                       min_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    print(time.monotonic() - started, flush=True)
"""


class StaticBatch:
    """A model that generates for one batch at a time."""

    def __init__(self, model_path: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, model_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # All cores, whatever the caller's own process was told.
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_VERBOSITY": "critical",
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                "OMP_NUM_THREADS": str(os.cpu_count()),
            },
        )

    def __enter__(self) -> StaticBatch:
        self._read()
        self.seconds([[5, 6, 7, 8]], 2)  # the first call is slower
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def seconds(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> float:
        """Seconds for `output_tokens` tokens after each of the prompts, which are equally long."""
        if self._process.stdin is None:
            raise RuntimeError("the transformers process has no pipe")
        asked = {"prompts": prompts, "output_tokens": output_tokens}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return float(self._read())

    def _read(self) -> str:
        if self._process.stdout is None:
            raise RuntimeError("the transformers process has no pipe")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the transformers process has ended; see its message above")
        return line
