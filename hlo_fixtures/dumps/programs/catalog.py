"""A dump as a value: which program, which arguments, printed in which form; and the decorator that lists it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

FORMS = {
    "full": "as lowered: metadata, stack-frame tables, every constant",
    "short": "as lowered, short-parsable: no %, no metadata, no backend_config",
    "typed": "as lowered, with the operands' types, as XLA printed them until 2025",
    "as_hlo_text": "as `XlaComputation.as_hlo_text()` gives it: no metadata, large constants elided",
    "old_metadata": "as lowered, with source_file= in the metadata instead of stack-frame tables",
    "compiled": "after XLA's optimizations for the CPU: fusions, layouts, a schedule",
    "proto": "an HloProto, as --xla_dump_hlo_as_proto writes it",
    "text": "HLO that JAX cannot emit, written by hand and printed by jaxlib",
    "raw": "HLO written by hand and kept as it is, because jaxlib would not print it so",
}


@dataclasses.dataclass(frozen=True)
class Dump:
    """One file of the corpus.

    `make` returns the function, jitted or not, and its arguments (arrays or ShapeDtypeStructs); for the forms `text`
    and `raw`, HLO text.
    """

    name: str
    form: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]] | str]
    platform: str = "cpu"


CATALOG: list[Dump] = []


def dump(*forms: str, platform: str = "cpu") -> Callable[[Any], Any]:
    """Lists a program under its function's name; a second form is listed as NAME_FORM."""

    def register(make: Any) -> Any:
        for index, form in enumerate(forms or ("full",)):
            assert form in FORMS, form
            CATALOG.append(Dump(make.__name__ if index == 0 else f"{make.__name__}_{form}", form, make, platform))
        return make

    return register


def array(shape: tuple[int, ...], dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def arrays(shapes: Mapping[str, tuple[int, ...]], dtype: Any = "float32") -> dict[str, jax.ShapeDtypeStruct]:
    return {name: array(shape, dtype) for name, shape in shapes.items()}
