"""A model directory without weights, an engine that follows a script, and a gateway of both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.engine.types import (
    ADMITTED,
    ChoiceDelta,
    EngineStats,
    FinishReason,
    GenerationRequest,
    TokenLogprob,
)
from gateway.frontend.frontend import Frontend, load_assets
from services.config import ServeConfig
from services.telemetry import Metrics

MODEL = "tiny"
MAX_MODEL_LEN = 128
VOCAB_SIZE = 600
"""Of the model; the tokenizer's is a little smaller."""
MESH = {
    "epoch": 1,
    "stages": [
        {
            **{"dp_rank": 0, "pp_rank": 0, "layer_start": 0, "layer_end": 2, "tp_size": 1},
            **{"node": "here", "state": "ready", "last_step_id": 3, "stalled_seconds": 0.0},
            "ranks": [{"tp_rank": 0, "device": "cpu:0", "pid": 1, "state": "ready"}],
        }
    ],
}
MAX_REQUESTS = 1024
REPLY = "The capital of France is Paris, a café on the Seine."
EOS = "<|im_end|>"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", EOS]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [REPLY, "What is the capital of France?", "system user assistant", "stop here now"]


def write_model(directory: Path) -> Path:
    """A tokenizer trained on a few sentences, with the files that stand beside it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    eos = tokenizer.token_to_id(EOS)
    files = {
        "tokenizer_config.json": {"eos_token": EOS, "chat_template": CHAT_TEMPLATE},
        "generation_config.json": {"eos_token_id": [eos], "temperature": 0.5},
        "config.json": {"vocab_size": VOCAB_SIZE, "eos_token_id": eos},
    }
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value))
    return directory


@dataclass
class ScriptedEngine:
    """Answers every request with `reply`, token by token, then ends with the model's stop."""

    tokenizer: Tokenizer
    reply: str = REPLY
    delay_seconds: float = 0.0
    """Before each token."""
    fail_with: Exception | None = None
    fail_after_tokens: int = 0
    num_cached_tokens: int = 0
    ready: bool = True
    seen: list[GenerationRequest] = field(default_factory=list)
    open_requests: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)

    def stats(self) -> EngineStats:
        return EngineStats(100, 100 - len(self.open_requests), 0, len(self.open_requests), 0, 0)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[ChoiceDelta]:
        self.seen.append(request)
        self.open_requests.add(request.request_id)
        done = False
        try:
            yield ADMITTED
            async for delta in self._deltas(request):
                yield delta
            done = True
        finally:
            self.open_requests.discard(request.request_id)
            if not done:
                self.aborted.append(request.request_id)

    async def _deltas(self, request: GenerationRequest) -> AsyncIterator[ChoiceDelta]:
        ids = self.tokenizer.encode(self.reply, add_special_tokens=False).ids
        if request.stop.max_tokens > len(ids) and not request.stop.stop_token_ids:
            ids = ids * (request.stop.max_tokens // len(ids) + 1)
        texts = [""] * request.n
        for position in range(len(ids)):
            if self.fail_with is not None and position >= self.fail_after_tokens:
                raise self.fail_with
            await asyncio.sleep(self.delay_seconds)
            last = position == min(len(ids), request.stop.max_tokens) - 1
            by_length = request.stop.max_tokens <= len(ids)
            for choice in range(request.n):
                before = texts[choice]
                whole = self.tokenizer.decode(ids[: position + 1]).removesuffix("\ufffd")
                texts[choice] = whole
                found = next((s for s in request.stop.stop_strings if s in whole), None)
                reason = None
                if found is not None:
                    texts[choice] = whole[: whole.index(found)]
                    reason = FinishReason.STOP
                elif last:
                    reason = FinishReason.LENGTH if by_length else FinishReason.STOP
                token_ids = (ids[position],)
                stop_reason: int | str | None = found
                if reason is FinishReason.STOP and found is None:
                    # The token that stops comes with the rest, and has no text.
                    stop_reason = self.tokenizer.token_to_id(EOS)
                    token_ids = (ids[position], self.tokenizer.token_to_id(EOS))
                yield ChoiceDelta(
                    choice_index=choice,
                    text=texts[choice][len(before) :],
                    token_ids=token_ids,
                    logprobs=self._logprobs(token_ids, request.sampling.num_logprobs),
                    finish_reason=reason,
                    stop_reason=stop_reason,
                    num_cached_tokens=0 if position or choice else self.num_cached_tokens,
                )
            if last or found is not None:
                return

    @staticmethod
    def _logprobs(ids: tuple[int, ...], count: int | None) -> tuple[TokenLogprob, ...]:
        if count is None:
            return ()
        return tuple(
            TokenLogprob(one, -0.5, tuple((one + rank, -0.5 - rank) for rank in range(count)))
            for one in ids
        )


@dataclass
class FakeGateway:
    """Everything behind the doors."""

    frontend: Frontend
    engine: ScriptedEngine
    metrics: Metrics
    tokenizer: Tokenizer


def make_gateway(directory: Path) -> FakeGateway:
    config = ServeConfig(model=str(directory))
    assets = load_assets(config, directory)
    engine = ScriptedEngine(assets.tokenizer.backend)
    metrics = Metrics()
    metrics.watch_engine(engine.stats)
    frontend = Frontend(
        engine,
        assets,
        model_names=(MODEL, "tiny-alias"),
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        metrics=metrics,
        max_requests=MAX_REQUESTS,
        seed=1,
        by_priority=True,
    )
    return FakeGateway(frontend, engine, metrics, assets.tokenizer.backend)


@dataclass
class Rest:
    """A running REST door."""

    gateway: FakeGateway
    url: str
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI


async def until(condition: Callable[[], object], seconds: float = 3.0) -> None:
    """Waits until the condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (conditions of any kind have no event)
            await asyncio.sleep(0.01)
