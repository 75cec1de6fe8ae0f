"""A kernel that takes a known time whatever the GPU's clock is: what is launched meanwhile then runs without gaps.

It looks at the GPU's nanosecond timer until that has moved on. Other work as a delay, such as matrix products, takes a
time that changes with the clock, and draws the power that lowers the clock of what follows: a tenth of four
milliseconds is as much as a hundred calls of a small convolution.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xla_fp8 import _jax_compat

SECONDS = 5e-3

_WAIT = """
{{
    .reg .pred early;
    .reg .b64 began, passed;
    mov.u64 began, %globaltimer;
LOOK:
    mov.u64 passed, %globaltimer;
    sub.u64 passed, passed, began;
    setp.lt.u64 early, passed, {nanoseconds};
    @early bra LOOK;
    st.global.u64 [$0], passed;
}}
"""


def wait() -> jax.Array:
    """Nanoseconds that went by, as two int32, the lower one first; at least `SECONDS`."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    text = _WAIT.format(nanoseconds=round(SECONDS * 1e9))

    def body(passed: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))  # type: ignore[no-untyped-call,untyped-decorator]
        def look(_: Any, passed: Any) -> None:
            _jax_compat.inline_ptx(text, shared=[], pointers=[passed])

        look(passed)

    words = jax.ShapeDtypeStruct((2,), jnp.int32)  # type: ignore[no-untyped-call]
    found: jax.Array = plgpu.kernel(body, out_type=words)()
    return found


def _busy(x: jax.Array) -> jax.Array:
    """Some work, where there is no GPU."""
    for _ in range(3):
        x = x @ x
    return x[0, 0]


@functools.cache
def compiled() -> Callable[[], jax.Array]:
    """The delay, ready to be launched."""
    if jax.default_backend() == "cpu":
        matrix = jnp.eye(16)
        return functools.partial(jax.jit(_busy).lower(matrix).compile(), matrix)
    found: Callable[[], jax.Array] = jax.jit(wait).lower().compile()
    return found
