"""examples/train_resnet.py and serve_unet.py: FP8 learns as bf16 does, serves near it, and is rewritten."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8
from tests.scripts import ROOT, load_script

pytestmark = pytest.mark.unoptimized

STEPS = 12


@pytest.fixture(scope="module", autouse=True)
def networks_beside_the_scripts() -> Iterator[None]:
    """As Python does it for a script: its folder is where it imports from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        yield


@pytest.fixture(scope="module")
def resnet(networks_beside_the_scripts: None) -> ModuleType:
    return load_script("examples/train_resnet.py")


@pytest.fixture(scope="module")
def unet(networks_beside_the_scripts: None) -> ModuleType:
    return load_script("examples/serve_unet.py")


@pytest.mark.slow
def test_resnet_learns_in_fp8(resnet: ModuleType) -> None:
    pytest.importorskip("sklearn", reason="ships the digits")
    config, found = resnet.SIZES["small"], {}
    for recipe in ("bf16", "delayed"):
        state, step = resnet.make(recipe, config, 32, 0.02, 0)
        found[recipe], _ = resnet.train(state, step, resnet.digits(32, 0), STEPS)
    assert found["delayed"][-3:].mean() < found["delayed"][0] - 0.2
    # The first losses are of the same parameters: they differ by what FP8 rounds.
    np.testing.assert_allclose(found["delayed"][0], found["bf16"][0], atol=0.1)
    np.testing.assert_allclose(found["delayed"][-3:].mean(), found["bf16"][-3:].mean(), atol=0.25)


def test_every_convolution_of_a_served_resnet_hands_fp8_to_the_next(resnet: ModuleType) -> None:
    """Conv, batch norm, relu (and the sum of a block) and the quantization for what follows are one graph each."""
    from networks import resnet as network
    from networks.layers import normal
    from networks.static import layer_at, static, stored

    params = stored(network.init(normal(0), network.TINY), fp8=True)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, xla_fp8.Float8))
    scales = {layer_at(path): jnp.float32(0.1) for path, leaf in leaves if isinstance(leaf, xla_fp8.Float8)}
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.bfloat16)
    served = xla_fp8.jit(lambda params, images: network.apply(params, images, static(scales)))
    report = served.report(params, images)
    assert (len(report.rewritten), report.refused_fp8) == (8, [])
    outputs = [entry.graph for entry in report.rewritten]
    # Two shortcuts are added to a bf16 sum, and the last block ends in a mean.
    assert sum("[f8e4m3fn]" in graph for graph in outputs) == 5
    assert all(graph.count("bias") == 2 and "channel_scale" in graph for graph in outputs)
    assert report.saved_bytes == sum(entry.saved_bytes for entry in report.rewritten) > 0


@pytest.mark.slow
def test_unet_serves_near_bf16(unet: ModuleType) -> None:
    found = unet.compare(unet.SIZES["small"], images=1, steps=2)
    (wide, _, wide_bytes), (narrow, _, narrow_bytes) = found["bf16"], found["FP8"]
    assert narrow_bytes < 0.6 * wide_bytes
    assert unet.difference(wide, narrow) < 0.3
    assert unet.difference(wide, narrow) > 0, "FP8 is rounded"
