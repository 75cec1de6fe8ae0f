"""Serves a diffusion UNet in FP8, beside bf16: calibrate once, store the weights in FP8, denoise.

    python examples/serve_unet.py                         on a CPU in a minute: a small one
    python examples/serve_unet.py --size sd1 --steps 20   on a GPU: the UNet of Stable Diffusion 1

The weights are random, so what comes out is no picture; how far FP8 is from bf16, and how long each takes, is told.
Only on a GPU do the times compare the two: a CPU computes what is FP8 in f32.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from networks import unet
from networks.layers import PLAIN, normal
from networks.static import observed, scales_of, static, stored

import xla_fp8

SIZES = {"small": unet.TINY, "sd1": unet.SD1}
GUIDANCE = 3.0
"""How far to go from the noise without a text towards that with it."""
TIMES = 1000

Denoise = Callable[..., jax.Array]


def make_denoise(config: unet.Config, fp8: bool) -> Denoise:
    """(parameters, scales, latents [N,H,W,4], time, next time, contexts [2N,T,C]) → latents: one step of DDIM."""

    def denoise(
        params: Any, scales: Any, latents: jax.Array, now: jax.Array, then: jax.Array, contexts: jax.Array
    ) -> jax.Array:
        ops = static(scales) if fp8 else PLAIN
        both = jnp.concatenate([latents, latents]).astype(jnp.bfloat16)
        noise = unet.apply(params, both, jnp.full(len(both), now), contexts, ops, config).astype(jnp.float32)
        without, with_text = jnp.split(noise, 2)
        noise = without + GUIDANCE * (with_text - without)
        clean = (latents - jnp.sqrt(1 - _kept(now)) * noise) / jnp.sqrt(_kept(now))
        return jnp.sqrt(_kept(then)) * clean + jnp.sqrt(1 - _kept(then)) * noise

    return xla_fp8.jit(denoise) if fp8 else jax.jit(denoise)


def _kept(time: jax.Array) -> jax.Array:
    """The share of the picture, squared, that is left at a time."""
    return jnp.cos(time / TIMES * 0.98 * np.pi / 2) ** 2


def serve(
    denoise: Denoise, params: Any, scales: Any, latents: jax.Array, contexts: jax.Array, steps: int
) -> tuple[jax.Array, float]:
    """Denoised latents, and the seconds of a step; the first call, which compiles, is not counted."""
    times = jnp.linspace(TIMES, 0, steps + 1)
    jax.block_until_ready(denoise(params, scales, latents, times[0], times[1], contexts))
    start = time.perf_counter()
    for now, then in itertools.pairwise(times):
        latents = denoise(params, scales, latents, now, then, contexts)
    jax.block_until_ready(latents)
    return latents, (time.perf_counter() - start) / steps


def inputs(config: unet.Config, images: int) -> tuple[jax.Array, jax.Array]:
    """Noise to begin with, and the encodings of no text and of a text."""
    rng = np.random.default_rng(1)
    size, channels = config.latent
    latents = jnp.asarray(rng.standard_normal((images, size, size, channels), np.float32))
    contexts = jnp.asarray(rng.standard_normal((2 * images, *config.context), np.float32), jnp.bfloat16)
    return latents, contexts


def bytes_of(params: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def compare(config: unet.Config, images: int, steps: int) -> dict[str, tuple[jax.Array, float, int]]:
    """Latents, seconds of a step and bytes of the parameters, in bf16 and in FP8."""
    params = unet.init(normal(0), config)
    latents, contexts = inputs(config, images)
    wide = stored(params, fp8=False)
    both = jnp.concatenate([latents, latents]).astype(jnp.bfloat16)
    amaxes = observed(unet.apply, wide, both, jnp.full(len(both), TIMES / 2), contexts, config=config)
    found = {}
    for kind, served, scales in (("bf16", wide, {}), ("FP8", stored(params, fp8=True), scales_of(amaxes))):
        denoise = make_denoise(config, fp8=kind == "FP8")
        result, seconds = serve(denoise, served, scales, latents, contexts, steps)
        found[kind] = result, seconds, bytes_of(served)
    return found


def difference(one: jax.Array, other: jax.Array) -> float:
    """The norm of the difference, as a share of the norm of the first."""
    return float(jnp.linalg.norm(other - one) / jnp.linalg.norm(one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    found = compare(SIZES[arguments.size], arguments.images, arguments.steps)
    for kind, (_, seconds, size) in found.items():
        print(f"{kind:4} {1e3 * seconds:8.2f} ms a step, {size / 1e6:,.1f} MB of parameters")
    if jax.default_backend() != "gpu":
        print("(no GPU: FP8 is computed in f32, and the times do not compare the two)")
    print(f"FP8 is {difference(found['bf16'][0], found['FP8'][0]):.1%} from bf16 after {arguments.steps} steps")


if __name__ == "__main__":
    main()
