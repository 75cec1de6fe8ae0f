"""Networks in FP8: for training by `xla_fp8.convert`; for inference as `examples/networks/static.py` has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xla_fp8

AMAX = 32.0
"""What activations are taken to reach, where scales are static: times do not depend on it."""


def converted(network: Callable[..., Any], recipe: str, tiny: bool) -> Any:
    """The function of a network, for training. All but attention, where there is no weight, is up to the recipe."""
    return xla_fp8.convert(
        network,
        xla_fp8.Recipe(recipe, min_flops=0 if tiny else None),  # type: ignore[arg-type]
        filter=lambda layer: "attention" not in layer.name,
    )
