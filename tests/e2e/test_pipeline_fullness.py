"""The pipeline stays full, at every depth and speed that is promised."""

from __future__ import annotations

import pytest

from benchmarks.pipeline_fullness import STAGES, TARGETS, TRIES, best_of, report


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage_seconds", TARGETS)
@pytest.mark.parametrize("pp_size", STAGES)
def test_a_full_pipeline(pp_size: int, stage_seconds: float) -> None:
    found = best_of(TRIES, pp_size, stage_seconds)
    assert found.ratio >= TARGETS[stage_seconds], report(found)
