"""How the consumers of all blocks find the amax together: atomic operations on words that are zero at first.

    each consumer    the bits of its largest value -> atomic max on the word of the amax; then atomic add on the count
    the last one     whose count is that of all others: the word of the amax -> the result

The bits of |x| have the order of the numbers, infinity above all of them and NaN above infinity, so a maximum of
integers is the amax, whatever the order in which consumers arrive: the same inputs give the same bits.

The words are Pallas' global semaphores, which XLA fills with zeros before the kernel: those of all kernels of a program
at once, where a kernel that reduces partial maxima takes 1.5 us behind each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from xla_fp8 import _jax_compat

_WARPGROUP = 128
"""Threads of a consumer, of which one speaks for all."""

_JOIN = """
{{
    .reg .pred silent, early;
    .reg .b32 thread, bits, arrived;
    mov.u32 thread, %tid.x;
    and.b32 thread, thread, {others};
    setp.ne.u32 silent, thread, 0;
    @silent bra END;
{raise_all}
    atom.acq_rel.gpu.global.add.u32 arrived, [$0], 1;
    setp.lt.u32 early, arrived, {last};
    @early bra END;
{write_all}
END:
}}
"""

_RAISE = """
    mov.b32 bits, ${value};
    and.b32 bits, bits, 0x7fffffff;
    red.relaxed.gpu.global.max.u32 [$0 + {word}], bits;"""

_WRITE = """
    ld.relaxed.gpu.global.b32 bits, [$0 + {word}];
    st.global.b32 [${result}], bits;"""


def words(count: int) -> Any:
    """Where `count` amaxes are found. Each call in a kernel makes other words."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR((1 + count,)))


def join(words: Any, largest: Sequence[jax.Array], results: Sequence[Any], consumers: int) -> None:
    """Called by every consumer of every block once.

    Args:
        words: of the kernel, from `words`.
        largest: of each amax the consumer's own, an f32 scalar; its sign does not count.
        results: of each amax a reference to f32 [1] in global memory, written by the consumer that comes last.
        consumers: how many call.
    """
    count = len(largest)
    text = _JOIN.format(
        others=_WARPGROUP - 1,
        last=consumers - 1,
        raise_all="".join(_RAISE.format(value=1 + count + i, word=4 + 4 * i) for i in range(count)),
        write_all="".join(_WRITE.format(result=1 + i, word=4 + 4 * i) for i in range(count)),
    )

    @plgpu.inline_mgpu(  # type: ignore[no-untyped-call,untyped-decorator]
        arg_types=(*[plgpu.RefType()] * (1 + count), *[plgpu.Layout.WG_SPLAT(())] * count)
    )
    def run(_: Any, *operands: Any) -> None:
        _jax_compat.inline_ptx(text, shared=[], pointers=operands[: 1 + count], values=operands[1 + count :])

    run(words, *results, *largest)
