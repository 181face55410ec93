"""A rule about what cannot be combined, what it looks at, and how it is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.topology.additional_config import NO_ADDITIONAL_CONFIG, AdditionalConfig
from services.topology.facts import ModelFacts
from services.topology.kv_transfer import KvTransferConfig


@dataclass(frozen=True, slots=True)
class MeshRequest:
    """What somebody wants to start, as far as a rule looks at it."""

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    nnodes: int = 1
    prefill_context_parallel_size: int = 1
    additional: AdditionalConfig = NO_ADDITIONAL_CONFIG
    kv_transfer: KvTransferConfig | None = None
    standby: bool = False
    """Whether spare workers are asked for."""
    backend: str = "mp"
    """Who starts the ranks: "mp" or "ray"."""
    interconnect: str = "auto"
    """One of `INTERCONNECTS`: what lies between the nodes' devices."""
    device: str | None = None
    """Device kind; None where it is not known yet."""
    facts: ModelFacts | None = None
    """The model; None where it is not read yet, and no rule about it applies."""


@dataclass(frozen=True, slots=True)
class Finding:
    """How a request breaks a rule."""

    asked: str
    """What was asked for, with its values."""
    remedy: str | None = None
    """A remedy with this request's values, where the rule's own is general."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    name: str
    condition: str
    """What is refused, for the page."""
    reason: str
    remedy: str
    param: str
    """The flag at fault."""
    find: Callable[[MeshRequest], Finding | None]
    source: str | None = None
    """Where the same is said of vLLM or vLLM Ascend."""


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A rule, and how it is broken."""

    rule: Rule
    finding: Finding

    @property
    def message(self) -> str:
        """One line: what was asked, why it cannot be, what to do, and the rule's name."""
        remedy = self.finding.remedy or self.rule.remedy
        return f"{self.finding.asked}: {self.rule.reason}; {remedy} (rule {self.rule.name})"
