"""How hidden layers are cut into consecutive stages. Pure functions over numbers.

A partition is a tuple with one entry per stage, in stage order: the number of
hidden layers of that stage. It is resolved once, at the head, and passed on as
data. The user's own partition comes from the flag or from the environment
variable that vLLM users know; every broken rule is named in the error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from services.errors import PartitionError
from services.text import shown

PARTITION_FLAG = "--pp-layer-partition"
PARTITION_ENV = "VLLM_PP_LAYER_PARTITION"
PP_SIZE_FLAG = "--pipeline-parallel-size"

# An entry longer than this is no layer count; it also keeps int() cheap on hostile text.
_MAX_ENTRY_CHARACTERS = 7
_INTEGER = re.compile(r"[+-]?[0-9]+")


def even_partition(num_layers: int, pp_size: int) -> tuple[int, ...]:
    """Cuts `num_layers` into `pp_size` stages as evenly as possible.

    The remainder goes one layer each to the second-to-last stage and from there
    towards lower ranks, so that the last stage (norm and head) gets none and
    the first (embedding) gets one only if all others in between have one. Equal
    to vLLM's `get_pp_indices` (vllm/distributed/utils.py) for all sizes that
    leave no stage empty. Raises `PartitionError` for the others.
    """
    check_stage_count(num_layers, pp_size)
    layers_per_stage, remainder = divmod(num_layers, pp_size)
    first_larger = pp_size - 1 - remainder
    return tuple(
        layers_per_stage + (1 if first_larger <= stage < pp_size - 1 else 0)
        for stage in range(pp_size)
    )


def check_stage_count(num_layers: int, pp_size: int) -> None:
    """Raises `PartitionError` unless every one of `pp_size` stages can have a layer."""
    if pp_size < 1:
        raise PartitionError(
            f"pipeline parallel size is {pp_size}; it must be at least 1", param=PP_SIZE_FLAG
        )
    if pp_size > num_layers:
        raise PartitionError(
            f"pipeline parallel size {pp_size} is above the model's {num_layers} hidden layers, "
            f"and every stage needs at least one; use a size of 1 to {num_layers}",
            param=PP_SIZE_FLAG,
        )


def parse_partition(text: str, *, param: str = PARTITION_FLAG) -> tuple[int, ...]:
    """Reads "32,29" (spaces around numbers are allowed) as a partition.

    Raises `PartitionError` with `param` where an entry is not a positive
    integer. Whether count and sum fit a model is `resolve_partition`'s matter.
    """
    if not text.strip():
        raise PartitionError(
            f'{param} is empty; give one positive integer per stage, such as "16,14", '
            "or leave it out for an even partition",
            param=param,
        )
    partition = []
    for stage, entry in enumerate(text.split(",")):
        stripped = entry.strip()
        if not _INTEGER.fullmatch(stripped) or len(stripped) > _MAX_ENTRY_CHARACTERS:
            raise PartitionError(
                f"{param}={_shown(text)}: entry {_shown(stripped)} of stage {stage} is not a "
                "layer count; give one positive integer per stage",
                param=param,
            )
        partition.append(int(stripped))
    _check_positive(partition, param)
    return tuple(partition)


def check_partition(
    partition: Sequence[int], num_layers: int, pp_size: int, *, param: str = PARTITION_FLAG
) -> None:
    """Raises `PartitionError`, naming the rule, unless the partition fits the model.

    The rules: one entry per stage, each at least 1, their sum is the number of
    hidden layers.
    """
    check_stage_count(num_layers, pp_size)
    text = format_partition(partition)
    if len(partition) != pp_size:
        raise PartitionError(
            f"{param}={_shown(text)} has {len(partition)} entries for {pp_size} stages; "
            f"give one per stage ({PP_SIZE_FLAG} {pp_size})",
            param=param,
        )
    _check_positive(partition, param)
    total = sum(partition)
    if total != num_layers:
        raise PartitionError(
            f"{param}={_shown(text)} sums to {total} layers, but the model has {num_layers} "
            "hidden layers; the two must be equal",
            param=param,
        )


def resolve_partition(
    num_layers: int,
    pp_size: int,
    partition: Sequence[int] | None = None,
    source: str = PARTITION_FLAG,
    default: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """The partition to use: the user's own where there is one, else `default` or the even one.

    `source` is where the user's own stands: flag, file or variable. Raises `PartitionError`
    that names it.
    """
    check_stage_count(num_layers, pp_size)
    if partition is None:
        return tuple(default or even_partition(num_layers, pp_size))
    check_partition(partition, num_layers, pp_size, param=source)
    return tuple(partition)


def format_partition(partition: Sequence[int]) -> str:
    """The spelling that `parse_partition` reads: "32,29"."""
    return ",".join(str(layers) for layers in partition)


def _check_positive(partition: Sequence[int], param: str) -> None:
    for stage, layers in enumerate(partition):
        if layers < 1:
            raise PartitionError(
                f"{param}={_shown(format_partition(partition))} gives stage {stage} {layers} "
                "layers; every stage needs at least 1",
                param=param,
            )


def _shown(text: str) -> str:
    return f'"{shown(text)}"'
