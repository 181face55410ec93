"""The compiled CPU kernels against torch in double precision, and where they come from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_worker.kernels import build
from stage_worker.kernels.build import KernelsUnavailable, load_library
from stage_worker.kernels.native import NativeLinear, NativeOperators
from stage_worker.kv.paged_cache import LayerKVCache
from stage_worker.layers.attention.metadata import RowSpan, build_metadata
from stage_worker.layers.linear import PlainLinear
from stage_worker.layers.norm import RMSNorm
from stage_worker.layers.operators import Operators, TorchOperators
from stage_worker.layers.rotary import RotaryTable
from stage_worker.platforms.cpu import CpuPlatform

CPU = torch.device("cpu")
TORCH = TorchOperators()
PRODUCT = "matrix product"
PROMPTS = "prompt attention"
BLOCKS = "blocks in one call"


@pytest.mark.parametrize("num_threads", [1, 2])
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40) | st.sampled_from([128, 300]),
    size_in=st.integers(1, 70) | st.just(1536),
    size_out=st.integers(1, 70) | st.just(200),
    with_bias=st.booleans(),
)
def test_linear(num_threads: int, rows: int, size_in: int, size_out: int, with_bias: bool) -> None:
    weight, x = torch.randn(size_out, size_in), torch.randn(rows, size_in)
    bias = torch.randn(size_out) if with_bias else None
    linear = NativeOperators(num_threads, TORCH).linear(weight, bias)
    assert isinstance(linear, NativeLinear)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    bound = 1e-6 * size_in + 1e-5
    torch.testing.assert_close(linear(x).double(), expected, atol=bound, rtol=1e-5)


def test_a_row_does_not_depend_on_its_company() -> None:
    """Bit by bit, so that a sequence's text is the same whoever else is in the batch."""
    linear = NativeOperators(1, TORCH).linear(torch.randn(96, 576), None)
    x = torch.randn(300, 576)
    whole = linear(x)
    for start, end in ((0, 1), (0, 2), (5, 12), (100, 140), (299, 300)):
        assert torch.equal(linear(x[start:end]), whole[start:end])


@pytest.mark.parametrize("width", [8, 48, 1536])
def test_silu_mul(width: int) -> None:
    gate_up = torch.randn(5, 2 * width) * 20
    gate_up[0, 0], gate_up[1, 0] = 1e4, -1e4
    gate, up = gate_up.double().chunk(2, -1)
    got = NativeOperators(1, TORCH).silu_mul(gate_up.clone()).double()
    torch.testing.assert_close(got, F.silu(gate) * up, atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("width", [8, 576])
def test_rms_norm(width: int) -> None:
    x, weight = torch.randn(5, width) * 10, torch.rand(width)
    x[0] = 0.0
    got = NativeOperators(1, TORCH).rms_norm(weight, 1e-5)(x).double()
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=2e-6)


def test_queries_and_keys_are_rotated_and_stored_as_torch_does() -> None:
    heads, kv_heads, dim, block_size = 6, 2, 32, 4
    tables = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32).numpy()
    spans = [RowSpan(0, 5, 1), RowSpan(1, 2, 1)]
    positions = torch.tensor([5, 2])
    metadata = build_metadata(spans, positions.numpy(), tables, block_size, CPU)
    rotary = RotaryTable(dim, 100.0, None, 16, torch.float32, CPU).rows(positions)
    qkv = torch.randn(2, heads + 2 * kv_heads, dim)
    results = []
    for operators in (TORCH, NativeOperators(1, TORCH)):
        torch.manual_seed(1)
        cache = LayerKVCache(*torch.randn(2, 4, block_size, kv_heads, dim))
        attend = operators.attention(heads, kv_heads, dim, torch.float32)
        output = attend(qkv.clone(), rotary, cache, metadata)
        results.append((output, cache.keys, cache.values))
    for torchs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, torchs, atol=1e-5, rtol=1e-5)


def attended(
    operators: Operators, qkv: torch.Tensor, chunks: Sequence[RowSpan], heads: int, block_size: int
) -> torch.Tensor:
    """One sequence's outputs [tokens, heads * dim], computed in these chunks."""
    kv_heads, dim = (qkv.shape[1] - heads) // 2, qkv.shape[2]
    num_blocks = -(-len(qkv) // block_size)
    torch.manual_seed(1)
    table = torch.randperm(num_blocks + 2)[:num_blocks].to(torch.int32).numpy()[None]
    shape = (2, num_blocks + 2, block_size, kv_heads, dim)
    cache = LayerKVCache(*torch.zeros(shape, dtype=qkv.dtype))
    attend = operators.attention(heads, kv_heads, dim, qkv.dtype)
    rotary = RotaryTable(dim, 100.0, None, len(qkv), qkv.dtype, CPU)
    outputs = []
    for chunk in chunks:
        positions = torch.arange(chunk.position, chunk.length)
        metadata = build_metadata([chunk], positions.numpy(), table, block_size, CPU)
        part = qkv[chunk.position : chunk.length].clone()
        outputs.append(attend(part, rotary.rows(positions), cache, metadata))
    return torch.cat(outputs)


def chunked(length: int, *ends: int) -> list[RowSpan]:
    """Row spans of a prompt that is cut at `ends`."""
    cuts = [0, *ends, length]
    return [RowSpan(0, start, end - start) for start, end in pairwise(cuts) if end > start]


@pytest.mark.parametrize("num_threads", [1, 2])
@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(2, 300),
    cut=st.integers(0, 299),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 8]),
    dim=st.sampled_from([16, 64, 128, 208]),
    block_size=st.sampled_from([1, 16, 48]),
)
def test_attention_of_prompts(
    num_threads: int, length: int, cut: int, kv_heads: int, group: int, dim: int, block_size: int
) -> None:
    heads = group * kv_heads
    qkv = torch.randn(length, heads + 2 * kv_heads, dim)
    chunks = chunked(length, min(cut, length))
    got = attended(NativeOperators(num_threads, TORCH), qkv, chunks, heads, block_size)
    expected = attended(TORCH, qkv.double(), chunks, heads, block_size)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


def decoded(
    operators: Operators, qkv: torch.Tensor, lengths: Sequence[int], heads: int, block_size: int
) -> torch.Tensor:
    """One step of decode rows over caches of the same random content: [rows, heads * dim]."""
    kv_heads, dim = (qkv.shape[1] - heads) // 2, qkv.shape[2]
    blocks = -(-max(lengths) // block_size)
    # Row i has the same blocks with the same content whatever the other rows are.
    generators = [torch.Generator().manual_seed(row) for row in range(len(lengths))]
    tables = torch.stack([torch.randperm(blocks, generator=one) for one in generators])
    tables += blocks * torch.arange(len(lengths))[:, None]
    shape = (2, blocks, block_size, kv_heads, dim)
    parts = [torch.randn(shape, generator=one) for one in generators]
    cache = LayerKVCache(*torch.cat(parts, 1).to(qkv.dtype))
    spans = [RowSpan(row, length - 1, 1) for row, length in enumerate(lengths)]
    positions = torch.tensor(lengths) - 1
    metadata = build_metadata(
        spans, positions.numpy(), tables.to(torch.int32).numpy(), block_size, CPU
    )
    rotary = RotaryTable(dim, 100.0, None, max(lengths), qkv.dtype, CPU).rows(positions)
    attend = operators.attention(heads, kv_heads, dim, qkv.dtype)
    return attend(qkv.clone(), rotary, cache, metadata)


@pytest.mark.parametrize("num_threads", [1, 2])
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 5, 8, 15]),
    dim=st.sampled_from([16, 64, 80]),
    block_size=st.sampled_from([1, 5, 16, 100]),
)
def test_attention_of_decodes(
    num_threads: int, lengths: list[int], kv_heads: int, group: int, dim: int, block_size: int
) -> None:
    heads = group * kv_heads
    qkv = torch.randn(len(lengths), heads + 2 * kv_heads, dim)
    got = decoded(NativeOperators(num_threads, TORCH), qkv, lengths, heads, block_size)
    expected = decoded(TORCH, qkv.double(), lengths, heads, block_size)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


def test_a_decode_does_not_depend_on_its_company() -> None:
    """Bit by bit: the same first row with longer, shorter and no other rows."""
    operators = NativeOperators(1, TORCH)
    qkv = torch.randn(3, 9 + 2 * 3, 64)
    (alone,) = decoded(operators, qkv[:1], [200], 9, 200)
    for others in ([3, 199], [200, 64], [65]):
        lengths = [200, *others]
        assert torch.equal(decoded(operators, qkv[: len(lengths)], lengths, 9, 200)[0], alone)


def test_a_prompt_does_not_depend_on_how_it_is_cut() -> None:
    """Bit by bit, where no chunk is a single token, which is computed as a decode."""
    operators = NativeOperators(1, TORCH)
    qkv = torch.randn(330, 9 + 2 * 3, 64)
    whole = attended(operators, qkv, chunked(330), 9, 16)
    for ends in ((64,), (63, 65), (2, 100, 250), (200, 328)):
        assert torch.equal(attended(operators, qkv, chunked(330, *ends), 9, 16), whole)


@pytest.mark.parametrize(("kv_heads", "dim"), [(3, 64), (5, 128)])
def test_a_prompt_does_not_depend_on_how_threads_share_it(kv_heads: int, dim: int) -> None:
    """Bit by bit: all KV heads in one thread, some in each, one in each."""
    heads = 3 * kv_heads
    qkv = torch.randn(230, heads + 2 * kv_heads, dim)
    chunks = chunked(230, 200, 210)
    results = [attended(NativeOperators(n, TORCH), qkv, chunks, heads, 16) for n in (1, 2, 5)]
    assert all(torch.equal(one, results[0]) for one in results)


def test_what_the_kernels_do_not_take_goes_to_torch() -> None:
    operators = NativeOperators(1, TORCH)
    assert isinstance(operators.linear(torch.randn(8, 4).bfloat16(), None), PlainLinear)
    assert isinstance(operators.rms_norm(torch.ones(7), 1e-5), RMSNorm)
    odd = torch.randn(3, 2 * 7)
    torch.testing.assert_close(operators.silu_mul(odd.clone()), TORCH.silu_mul(odd.clone()))
    for head_dim, dtype in ((24, torch.float32), (64, torch.float16)):
        theirs = TORCH.attention(4, 2, head_dim, dtype)
        assert type(operators.attention(4, 2, head_dim, dtype)) is type(theirs)


def test_eager_takes_torch_s_operators() -> None:
    assert isinstance(CpuPlatform().operators(enforce_eager=True), TorchOperators)
    assert isinstance(CpuPlatform().operators(enforce_eager=False), NativeOperators)


class TestLibrary:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("STAGEMESH_HOME", str(tmp_path))
        return tmp_path

    def test_it_is_compiled_once(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        load_library()
        (library,) = (home / "kernels").iterdir()
        made = library.stat().st_mtime_ns
        monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled twice"))
        load_library()
        assert library.stat().st_mtime_ns == made

    def test_without_a_compiler_torch_is_used(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("CC", "no-such-compiler")
        with pytest.raises(KernelsUnavailable, match="CC names no-such-compiler"):
            load_library()
        assert isinstance(CpuPlatform().operators(enforce_eager=False), TorchOperators)
        assert "no compiled kernels" in caplog.text

    def test_a_compiler_that_fails_says_why(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = home / "cc"
        broken.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo no disk >&2; exit 1; }\n')
        broken.chmod(0o755)
        monkeypatch.setenv("CC", str(broken))
        with pytest.raises(KernelsUnavailable, match="no disk"):
            load_library()
        assert list((home / "kernels").iterdir()) == []

    def test_a_compiler_without_openmp_and_native_is_enough(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        modest = home / "cc"
        modest.write_text(
            '#!/bin/sh\ncase "$*" in *-fopenmp*|*=native*) exit 1;; esac\nexec cc "$@"\n'
        )
        modest.chmod(0o755)
        monkeypatch.setenv("CC", str(modest))
        weight, x = torch.randn(40, 8), torch.randn(3, 8)
        linear = NativeOperators(2, TORCH).linear(weight, None)
        torch.testing.assert_close(linear(x), F.linear(x, weight), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize(
        ("source", "right", "wrong", "what"),
        [
            ("linear.c", "floats_##M(x, in,", "floats_1(x, in,", f"{PRODUCT}, 2 rows"),
            ("linear.c", "[(k + i) * rows + m] = x", "[(k + i) * rows] = x", f"{PRODUCT}, 2 rows"),
            ("linear.c", "codes_##M(x, in,", "codes_1(x, in,", f"{PRODUCT} with codes, 2 rows"),
            (
                "weights.h",
                "(codes), scale, minus)",
                "(codes), minus, scale)",
                f"{PRODUCT} with codes, 1 rows",
            ),
            ("weights.h", "HALF_BITS 16", "HALF_BITS 15", f"{PRODUCT} with halves, 1 rows"),
            ("layers.c", "/ (float)width + eps", "/ (float)(width + 1) + eps", "RMS norm"),
            ("layers.c", "vexp(-g) + 1.0f", "vexp(-g) + 1.01f", "SiLU"),
            ("layers.c", "(c + i) + b *", "(c + i) - b *", "rotation, keys in the cache"),
            ("layers.c", "slots[row] * kv, x,", "slots[row] * kv, x - kv,", "values in the cache"),
            ("attention.c", "case M: mix_##M##_##R(", "case M: mix_1_##R(", "decode attention"),
            ("prompt_attention.c", "(s->start + p - q->", "(s->start + p - 1 - q->", PROMPTS),
            ("prompt_attention.c", "case M: mix_##M(", "case M: mix_1(", PROMPTS),
            ("prompt_attention.c", "first + start, whole", "first, whole", PROMPTS),
            ("prompt_attention.c", "= unit % parts * together;", "= 0;", PROMPTS),
            ("prompt_attention.c", "offset = head * dim;", "offset = 0;", PROMPTS),
            ("attention.c", "= unit % parts * together;", "= 0;", "decode attention"),
            ("blocks.c", "add(hidden, b, numbers)", "add(hidden, a, numbers)", BLOCKS),
            ("blocks.c", "&one->mlp_norm", "&one->input_norm", BLOCKS),
        ],
    )
    def test_wrong_kernels_are_not_served(
        self,
        home: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        source: str,
        right: str,
        wrong: str,
        what: str,
    ) -> None:
        """As a compiler with a fault would make them."""
        for path in (*build._HEADERS, *build.SOURCES):
            text = path.read_text()
            if path.name == source:
                assert text.count(right) == 1
                text = text.replace(right, wrong)
            (home / path.name).write_text(text)
        monkeypatch.setattr(build, "SOURCES", [home / path.name for path in build.SOURCES])
        # Compiled in a fraction of the time.
        flags = tuple(flag for flag in build._BASE_FLAGS if flag != "-O3")
        monkeypatch.setattr(build, "_BASE_FLAGS", flags)
        with pytest.raises(KernelsUnavailable) as caught:
            NativeOperators(1, TORCH)
        assert str(caught.value) == f"the compiled kernels give wrong results ({what})"
        assert isinstance(CpuPlatform().operators(enforce_eager=False), TorchOperators)
        assert what in caplog.text

    def test_a_library_that_others_can_change_is_not_loaded(self, home: Path) -> None:
        load_library()
        (library,) = (home / "kernels").iterdir()
        library.chmod(0o777)
        with pytest.raises(KernelsUnavailable, match="can be changed by other users"):
            load_library()


def test_exp_is_exact_enough_over_its_whole_range() -> None:
    """Through silu_mul, whose only inexact part it is."""
    gate = torch.linspace(-80, 80, 16001)[:16000].view(1, -1)
    gate_up = torch.cat((gate, torch.ones_like(gate)), 1)
    got = NativeOperators(1, TORCH).silu_mul(gate_up)[0].double()
    expected = F.silu(gate[0].double())
    error = ((got - expected) / expected.abs().clamp_min(1e-30)).abs()
    assert float(error.max()) < 1e-6 and math.isfinite(float(got.sum()))
