"""Greedy tokens and logprobs of a served mesh against `transformers` on the same checkpoint.

A first difference counts as equal only where the oracle itself is undecided: a
gap of less than 1e-4 between its two best logits at that place, for at most 1 %
of the prompts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from stagemesh import AsyncClient
from tests.mesh_process import MeshProcess
from tests.tiny_models import TinyShape, make_tiny_llama

NUM_TOKENS = 64
UNDECIDED_GAP = 1e-4
MOST_UNDECIDED = 0.01
LOGPROB_TOLERANCE = 1e-3

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "Water boils at",
    "A haiku about autumn:\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8, 13,",
    "The mitochondria is",
    "In 1969, the first man",
    "To bake bread you need flour,",
    "<|im_start|>user\nName three planets.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nTranslate 'good morning' to Spanish.<|im_end|>\n<|im_start|>assistant\n",
    "SELECT name FROM users WHERE",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "It was the best of times, it was the worst of times, " * 4,
    "import numpy as np\n\nx = np.",
    "Q: Who wrote Hamlet?\nA:",
    "Yes",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's continuation."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Oracle:
    """`transformers`, greedy, on the same files."""

    def __init__(self, path: Path) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        # More threads than free cores make each wait for the slowest.
        torch.set_num_threads(1)
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model.generation_config.eos_token_id = None  # the mesh is told to go on, too
        self._known: dict[tuple[tuple[int, ...], ...], list[tuple[int, ...]]] = {}

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text)["input_ids"])

    def continuations(self, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """What `generate` makes of each prompt, all in one batch (padded on the left)."""
        wanted = tuple(prompts)
        if wanted not in self._known:
            longest = max(map(len, wanted))
            ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in wanted])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in wanted])
            with torch.inference_mode():
                whole = self.model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=NUM_TOKENS,
                    min_new_tokens=NUM_TOKENS,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            self._known[wanted] = [tuple(row) for row in whole[:, longest:].tolist()]
        return self._known[wanted]

    def logits(self, answer: Answer) -> torch.Tensor:
        """Teacher forcing: [tokens, vocab], the logits from which each token was drawn."""
        ids = torch.tensor([answer.prompt + answer.tokens[:-1]])
        with torch.inference_mode():
            logits: torch.Tensor = self.model(ids).logits[0, len(answer.prompt) - 1 :]
        return logits


async def ask_all(mesh: MeshProcess, prompts: Sequence[tuple[int, ...]]) -> list[Answer]:
    async with AsyncClient(mesh.grpc_address) as client:

        async def ask(prompt: tuple[int, ...]) -> Answer:
            generation = await client.generate(
                token_ids=prompt,
                temperature=0,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                logprobs=0,
                timeout=200,
            )
            logprobs = tuple(entry.logprob for entry in generation.logprobs)
            return Answer(prompt, tuple(generation.token_ids), logprobs)

        return list(await asyncio.gather(*(ask(prompt) for prompt in prompts)))


def check(oracle: Oracle, answers: Sequence[Answer]) -> None:
    undecided = 0
    continuations = oracle.continuations([answer.prompt for answer in answers])
    for answer, expected in zip(answers, continuations, strict=True):
        assert len(answer.tokens) == len(answer.logprobs) == NUM_TOKENS
        logits = oracle.logits(answer)
        agreed = NUM_TOKENS
        if answer.tokens != expected:
            agreed = next(i for i in range(NUM_TOKENS) if answer.tokens[i] != expected[i])
            best = logits[agreed].topk(2).values
            gap = float(best[0] - best[1])
            assert gap < UNDECIDED_GAP, f"token {agreed} differs where the oracle's gap is {gap}"
            undecided += 1
        theirs = torch.log_softmax(logits, dim=-1)
        drawn = theirs[torch.arange(NUM_TOKENS), torch.tensor(answer.tokens)]
        off = (drawn - torch.tensor(answer.logprobs))[:agreed].abs().max() if agreed else 0.0
        assert off < LOGPROB_TOLERANCE
    assert undecided <= MOST_UNDECIDED * len(answers)


@pytest.fixture(scope="module")
def demo_oracle(demo_model: Path) -> Oracle:
    return Oracle(demo_model)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pp_size", [1, 2, 3])
async def test_the_demo_model_at_every_depth(
    demo_model: Path, demo_oracle: Oracle, pp_size: int
) -> None:
    with MeshProcess(demo_model, "-pp", str(pp_size), "--max-model-len", "1024") as mesh:
        answers = await ask_all(mesh, [demo_oracle.encode(text) for text in PROMPTS])
    check(demo_oracle, answers)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
async def test_tensor_and_pipeline_parallel_together(tmp_path: Path, tied: bool) -> None:
    """TP 2 x PP 2 on a random model, with its head tied to the embedding and not (F6)."""
    model = make_tiny_llama(tmp_path / "tiny", tied=tied, shape=TinyShape(num_layers=5))
    oracle = Oracle(model)
    with MeshProcess(model, "-pp", "2", "-tp", "2") as mesh:
        answers = await ask_all(mesh, [oracle.encode(text[:60]) for text in PROMPTS])
    check(oracle, answers)
