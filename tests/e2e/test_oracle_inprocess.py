"""Stages against `transformers` on the same checkpoint: same tokens, same log probabilities.

The stages run in this process and their boundary tensors are passed by hand;
tensor parallelism runs in spawned processes over gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.v1 import step_pb2
from tests.stage_chain import (
    GREEDY,
    Job,
    StageChain,
    make_runner,
    random_prompts,
    run_jobs,
    stage_plan,
)
from tests.tensor_parallel_mesh import TensorParallelMesh
from tests.tiny_models import TinyShape, make_tiny_llama, make_tiny_mistral

NUM_TOKENS = 24
LOGPROB_TOLERANCE = 1e-3
NEAR_TIE = 1e-4
"""Where the best two logits are closer than this, either token counts as right."""

CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "untied": lambda path: make_tiny_llama(path),
    "tied": lambda path: make_tiny_llama(path, tied=True),
    "llama3-rope-bias-sharded": lambda path: make_tiny_llama(
        path, llama3_rope=True, bias=True, max_shard_bytes=20_000
    ),
    "mistral": lambda path: make_tiny_mistral(path),
    "multi-head": lambda path: make_tiny_llama(path, shape=TinyShape(num_kv_heads=4)),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes each checkpoint at most once."""
    made: dict[str, Path] = {}

    def checkpoint(name: str) -> Path:
        if name not in made:
            made[name] = CHECKPOINTS[name](tmp_path_factory.mktemp("model") / name)
        return made[name]

    return checkpoint


class Oracle:
    """`transformers` on a checkpoint."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.vocab_size: int = self._model.config.vocab_size

    @torch.inference_mode()
    def logits(self, tokens: list[int], num_last: int) -> torch.Tensor:
        """[num_last, vocab]: what stands before each of the last tokens."""
        logits: torch.Tensor = self._model(torch.tensor([tokens])).logits[0]
        return logits[-num_last - 1 : -1].float()

    def check_greedy(self, job: Job) -> None:
        """The job's output is the greedy one, its log probabilities are right."""
        logits = self.logits(job.tokens, len(job.output))
        reference = torch.log_softmax(logits, -1)
        best = reference.topk(2, -1)
        assert len(job.output) == job.num_tokens
        for i, token in enumerate(job.output):
            gap = float(best.values[i, 0] - best.values[i, 1])
            assert token == int(best.indices[i, 0]) or gap < NEAR_TIE, f"token {i}"
            assert job.logprobs[i].logprob == pytest.approx(
                float(reference[i, token]), abs=LOGPROB_TOLERANCE
            )
            top = list(job.logprobs[i].top_logprobs)
            assert top == pytest.approx(best.values[i].tolist(), abs=LOGPROB_TOLERANCE)


@pytest.fixture(scope="module")
def oracle(checkpoints: Callable[[str], Path]) -> Callable[[str], Oracle]:
    made: dict[str, Oracle] = {}

    def make(name: str) -> Oracle:
        if name not in made:
            made[name] = Oracle(checkpoints(name))
        return made[name]

    return make


@pytest.mark.parametrize("partition", [(5,), (3, 2), (2, 1, 2)], ids=["pp1", "pp2", "pp3"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_tokens_and_logprobs_equal_transformers(
    name: str,
    partition: tuple[int, ...],
    checkpoints: Callable[[str], Path],
    oracle: Callable[[str], Oracle],
) -> None:
    jobs = [Job(prompt, NUM_TOKENS) for prompt in random_prompts(5, oracle(name).vocab_size)]
    run_jobs(StageChain(checkpoints(name), partition), jobs, chunk=16)
    for job in jobs:
        oracle(name).check_greedy(job)


@pytest.mark.parametrize("chunk", [1, 3, 8, 17, 512])
def test_chunked_prefill_changes_nothing(
    chunk: int, checkpoints: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    jobs = [Job(prompt, 8) for prompt in random_prompts(3, oracle("untied").vocab_size, seed=1)]
    run_jobs(StageChain(checkpoints("untied"), (3, 2)), jobs, chunk=chunk)
    for job in jobs:
        oracle("untied").check_greedy(job)


def test_a_prefix_that_is_cached_is_not_computed_again(
    checkpoints: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    chain = StageChain(checkpoints("untied"), (3, 2))
    prompt = random_prompts(1, oracle("untied").vocab_size, seed=2)[0][:3] * 8  # 24 tokens
    start = step_pb2.SlotStart(slot=0, sampling=GREEDY)
    first = step_pb2.StepRow(slot=0, token_ids=prompt[:16], new_block_ids=[4, 9])
    chain(step_pb2.Step(step_id=1, starts=[start], rows=[first]))
    start.slot = 1
    rest = step_pb2.StepRow(
        slot=1, position=16, token_ids=prompt[16:], new_block_ids=[4, 9, 2], num_sampled=1
    )
    (result,) = chain(step_pb2.Step(step_id=2, starts=[start], rows=[rest]))
    job = Job(prompt, 1, output=list(result.token_ids), logprobs=list(result.logprobs))
    oracle("untied").check_greedy(job)


def test_drafts_are_accepted_exactly_as_far_as_greedy_decoding_agrees(
    checkpoints: Callable[[str], Path],
) -> None:
    chain = StageChain(checkpoints("untied"), (3, 2))
    prompt = [5, 6, 7, 8]
    truth = run_jobs(chain, [Job(prompt, 6)])[0]
    wrong = (truth[2] + 1) % 256
    start = step_pb2.SlotStart(slot=5, sampling=GREEDY)
    chain(
        step_pb2.Step(
            step_id=1,
            starts=[start],
            rows=[step_pb2.StepRow(slot=5, token_ids=prompt, new_block_ids=[0, 1], num_sampled=1)],
        )
    )
    verify = step_pb2.StepRow(
        slot=5, position=4, token_ids=[truth[0], truth[1], wrong, truth[3]], num_sampled=4
    )
    (result,) = chain(step_pb2.Step(step_id=2, rows=[verify]))
    assert list(result.token_ids) == truth[1:3]
    # Two of four were accepted: the next row starts where the first rejected one stood.
    again = step_pb2.StepRow(slot=5, position=6, token_ids=[truth[2], truth[3]], num_sampled=2)
    (result,) = chain(step_pb2.Step(step_id=3, rows=[again]))
    assert list(result.token_ids) == truth[3:5]


SAMPLED = step_pb2.SamplingParams(
    temperature=0.9,
    top_p=0.95,
    seed=77,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
)


@settings(max_examples=8, deadline=None)
@given(chunk=st.integers(2, 40), when=st.integers(2, 14), who=st.integers(0, 2))
def test_replay_after_preemption_gives_the_same_tokens(
    checkpoints: Callable[[str], Path], chunk: int, when: int, who: int
) -> None:
    chain = StageChain(checkpoints("tied"), (3, 2))
    prompts = random_prompts(3, 256, seed=3)
    calm = [Job(prompt, 12, SAMPLED, choice_index=i) for i, prompt in enumerate(prompts)]
    undisturbed = run_jobs(chain, calm)
    for runner in chain.runners:
        runner.reset()
    jobs = [Job(prompt, 12, SAMPLED, choice_index=i) for i, prompt in enumerate(prompts)]
    assert run_jobs(chain, jobs, chunk=chunk, preempted_at={when: who}) == undisturbed


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.5), ("float16", 0.05)])
def test_half_precision_stays_close_to_transformers(
    dtype: str,
    tolerance: float,
    checkpoints: Callable[[str], Path],
    oracle: Callable[[str], Oracle],
) -> None:
    jobs = [Job(prompt, 4) for prompt in random_prompts(3, oracle("tied").vocab_size, seed=4)]
    run_jobs(StageChain(checkpoints("tied"), (3, 2), dtype=dtype), jobs)
    for job in jobs:
        reference = torch.log_softmax(oracle("tied").logits(job.tokens, 4), -1)
        for i, token in enumerate(job.output):
            # 8 and 11 bits of mantissa through 5 layers of random weights.
            assert job.logprobs[i].logprob == pytest.approx(
                float(reference[i, token]), abs=tolerance
            )


def test_tensor_parallel_stages_equal_transformers(tmp_path: Path) -> None:
    cases = [
        # An odd vocabulary is padded; biases of row-parallel products count once.
        (make_tiny_llama(tmp_path / "a", bias=True, shape=TinyShape(vocab_size=287)), (3, 2), 2),
        (make_tiny_llama(tmp_path / "b", tied=True), (3, 2), 2),
        # Four ranks share two KV heads.
        (make_tiny_llama(tmp_path / "c", shape=TinyShape(num_heads=8)), (5,), 4),
    ]
    with TensorParallelMesh(world_size=4) as mesh:
        for path, partition, tp_size in cases:
            weight_bytes = mesh.load(path, partition, tp_size)
            whole = make_runner(stage_plan(path, (5,), 0)).load(lambda a, b: None).weight_bytes
            assert max(weight_bytes) < whole / 2
            jobs = [Job(prompt, 12) for prompt in random_prompts(3, 287, seed=6)]
            run_jobs(mesh, jobs, chunk=16)
            reference = Oracle(path)
            for job in jobs:
                reference.check_greedy(job)
