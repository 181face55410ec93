"""Meshes of simulated devices: a model directory without weights, what steps cost, and the
trace that tells when each stage computed.

    with simulated_mesh(tmp_path, 4, StageCost(0.02)) as mesh:
        outputs = generate_all(mesh, prompts, 10)
    steps = read_trace(tmp_path)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from services.topology.simulated_cost import StageCost
from stage_worker.simulated.tokens import expected_tokens
from stagemesh import AsyncClient
from tests.mesh_process import MeshProcess

VOCAB_SIZE = 256
TRACE_FILE = "trace.json"
GENERATE_TIMEOUT_SECONDS = 120.0
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "float32",
}
"""Activations as wide as those of SmolLM2-135M; a byte each token."""


@dataclass(frozen=True, slots=True)
class StageStep:
    """One step on one stage, from the trace. Seconds."""

    stage: int
    step_id: int
    start: float
    """Of computing, like all times by the monotonic clock."""
    end: float
    sampled_rows: int
    control_wait: float
    receive: float
    compute: float
    send: float
    done: float
    """When everything of the step was over."""

    @property
    def phases(self) -> float:
        """The four together."""
        return self.control_wait + self.receive + self.compute + self.send


def make_model(path: Path) -> Path:
    """A directory with config and tokenizer, and no weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(_CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def simulated_mesh(
    directory: Path,
    pp_size: int,
    cost: StageCost,
    *flags: str,
    stages: Mapping[int, StageCost] | None = None,
    environment: Mapping[str, str] | None = None,
) -> MeshProcess:
    """A mesh with its model, cost file and trace in `directory`; `environment` is added to that
    of its processes."""
    directory.mkdir(exist_ok=True)
    content = {
        "every_stage": asdict(cost),
        "stages": {str(stage): asdict(own) for stage, own in (stages or {}).items()},
    }
    (directory / "cost.json").write_text(json.dumps(content))
    return MeshProcess(
        make_model(directory / "model"),
        *("-pp", str(pp_size), "--device", "sim", "--sim-cost", str(directory / "cost.json")),
        *("--step-trace", str(directory / TRACE_FILE), *flags),
        environment=environment,
    )


def generate_all(
    mesh: MeshProcess, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """All prompts at a time; the tokens of each."""

    async def generate() -> list[list[int]]:
        async with AsyncClient(mesh.grpc_address) as client:
            answers = await asyncio.gather(
                *(
                    client.generate(
                        token_ids=list(prompt),
                        max_tokens=num_tokens,
                        ignore_eos=True,
                        timeout=GENERATE_TIMEOUT_SECONDS,
                    )
                    for prompt in prompts
                )
            )
        return [list(answer.token_ids) for answer in answers]

    return asyncio.run(generate())


def prompts_of(count: int, length: int) -> list[list[int]]:
    """`count` prompts of `length` tokens, no two alike from their first token on."""
    return [[(7 * i + 13 * j + i * j) % VOCAB_SIZE for j in range(length)] for i in range(count)]


def expected_outputs(prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """What a right mesh answers."""
    return [expected_tokens(prompt, num_tokens, VOCAB_SIZE) for prompt in prompts]


def read_trace(directory: Path) -> list[StageStep]:
    """All lines of a mesh that has ended, in order of stage and step."""
    text = (directory / TRACE_FILE).read_text()
    events = json.loads(text.rstrip(",\n") + "]")
    steps = [
        StageStep(
            stage=event["tid"],
            step_id=event["args"]["step_id"],
            start=event["ts"] * 1e-6,
            end=(event["ts"] + event["dur"]) * 1e-6,
            sampled_rows=event["args"]["sampled_rows"],
            control_wait=event["args"]["control_wait_us"] * 1e-6,
            receive=event["args"]["receive_us"] * 1e-6,
            compute=event["args"]["compute_us"] * 1e-6,
            send=event["args"]["send_us"] * 1e-6,
            done=event["args"]["end_us"] * 1e-6,
        )
        for event in events
    ]
    return sorted(steps, key=lambda step: (step.stage, step.step_id))


def of_stage(steps: Sequence[StageStep], stage: int) -> list[StageStep]:
    """The steps of one stage, in order."""
    return [step for step in steps if step.stage == stage]


def step_seconds(steps: Sequence[StageStep], pp_size: int) -> float:
    """Seconds from one step to the next where they leave the pipeline, on average."""
    last = of_stage(steps, pp_size - 1)
    return (last[-1].end - last[0].end) / (len(last) - 1)
