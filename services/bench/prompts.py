"""The requests of a run: prompts of the wanted lengths, as the endpoint takes them.

A completion's prompt is sent as token ids, so its length is exact whatever the tokenizer. The
ids are those that the endpoint's own /tokenize gives for common words: real tokens, none of
them special. Without /tokenize, and for chat, prompts are texts of about that length; how
many tokens they had, the endpoint says in `usage`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.bench import lengths
from services.bench.endpoint import BenchRequest, Endpoint
from services.bench.lengths import RequestLengths
from services.bench.settings import BenchSettings
from services.errors import UsageError

_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education foot boy age policy "
    "music market sense nation plan college interest death experience effect use class control "
    "field development role effort rate heart drug show leader light voice wife police mind "
    "price report decision son view relationship town road arm difference value building action "
    "season society tax director position player record paper space ground form event official "
    "matter center couple site project activity star table need court oil situation cost"
)
WORDS = tuple(_TEXT.split())
"""Common nouns."""
CHARACTERS_PER_TOKEN = 4
"""Of English text, where nobody can count: the usual rule of thumb."""


@dataclass(frozen=True, slots=True)
class PromptSource:
    """How prompts of a length are made."""

    token_ids: tuple[int, ...]
    """Ids to draw from; empty where prompts have to be texts."""
    tokens_per_word: float
    """Of WORDS, each with a space before it."""
    exact: bool
    """Whether a prompt has exactly the wanted number of tokens."""

    def prompt(self, num_tokens: int, rng: random.Random) -> list[int] | str:
        """A prompt of that many tokens."""
        if self.token_ids:
            return rng.choices(self.token_ids, k=num_tokens)
        words = max(1, round(num_tokens / self.tokens_per_word))
        return " ".join(rng.choices(WORDS, k=words))


async def prompt_source(endpoint: Endpoint, model: str, *, is_chat: bool) -> PromptSource:
    """Asks the endpoint how it counts."""
    ids = await endpoint.tokenize(model, "".join(f" {word}" for word in WORDS))
    if ids is None:
        return PromptSource((), 1.0, exact=False)
    if is_chat:
        return PromptSource((), len(ids) / len(WORDS), exact=False)
    return PromptSource(tuple(sorted(set(ids))), len(ids) / len(WORDS), exact=True)


async def make_requests(
    endpoint: Endpoint, settings: BenchSettings, model: str, count: int, rng: random.Random
) -> tuple[list[BenchRequest], bool]:
    """The requests in the order in which they are sent, and whether their prompts have
    exactly the lengths that were asked for. Raises `UsageError` for an unusable file."""
    if settings.dataset_name == "sharegpt":
        prompts = await _sharegpt(endpoint, settings, model, count, rng)
        return [_request(settings, model, *prompt) for prompt in prompts], True
    source = await prompt_source(endpoint, model, is_chat=settings.is_chat)
    prefix = source.prompt(settings.random_prefix_len, rng) if settings.random_prefix_len else None
    requests = []
    for one in _lengths(settings, count, rng):
        prompt = source.prompt(one.input_tokens, rng)
        if isinstance(prompt, list):
            prompt = [*(prefix or ()), *prompt]
        elif prefix is not None:
            prompt = f"{prefix} {prompt}"
        requests.append(_request(settings, model, prompt, one.output_tokens))
    return requests, source.exact


def _lengths(settings: BenchSettings, count: int, rng: random.Random) -> list[RequestLengths]:
    if settings.dataset_name == "sharegpt-like":
        return lengths.sharegpt_like_lengths(count, rng)
    return lengths.random_lengths(
        count,
        settings.random_input_len,
        settings.random_output_len,
        settings.random_range_ratio,
        rng,
    )


def _request(
    settings: BenchSettings, model: str, prompt: list[int] | str, output_tokens: int
) -> BenchRequest:
    body: dict[str, object] = {"model": model, "max_tokens": output_tokens}
    if settings.is_chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    body |= {
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    body |= settings.extra_body or {}
    return BenchRequest(json.dumps(body).encode(), output_tokens)


async def _sharegpt(
    endpoint: Endpoint, settings: BenchSettings, model: str, count: int, rng: random.Random
) -> list[tuple[str, int]]:
    """Prompt and output tokens of `count` conversations; a short file is gone through again."""
    turns = list(read_sharegpt(settings.dataset_path or ""))
    rng.shuffle(turns)
    fixed = settings.sharegpt_output_len
    found: list[tuple[str, int]] = []
    for question, answer in turns:
        if len(found) == count:
            break
        input_tokens = await _count(endpoint, model, question)
        output_tokens = fixed or await _count(endpoint, model, answer)
        minimum = lengths.MIN_SHAREGPT_TOKENS
        checked = RequestLengths(
            input_tokens, max(output_tokens, minimum) if fixed else output_tokens
        )
        if lengths.is_usable(checked):
            found.append((question, output_tokens))
    if not found:
        raise UsageError(f"--dataset-path {settings.dataset_path} has no conversation to use")
    return [found[index % len(found)] for index in range(count)]


async def _count(endpoint: Endpoint, model: str, text: str) -> int:
    ids = await endpoint.tokenize(model, text) if text else []
    return len(text) // CHARACTERS_PER_TOKEN if ids is None else len(ids)


def read_sharegpt(path: str) -> Iterator[tuple[str, str]]:
    """The first two turns of every conversation of a ShareGPT JSON file.

    Raises `UsageError` for a file that is none.
    """
    try:
        entries = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--dataset-path {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"--dataset-path {path} is not JSON in UTF-8") from None
    if not isinstance(entries, list):
        raise UsageError(f"--dataset-path {path} must be a list of conversations")
    for entry in entries:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if isinstance(turns, Sequence) and len(turns) >= 2:
            question, answer = (_said(turn) for turn in turns[:2])
            if question is not None and answer is not None:
                yield question, answer


def _said(turn: object) -> str | None:
    value = turn.get("value") if isinstance(turn, dict) else None
    return value if isinstance(value, str) else None
