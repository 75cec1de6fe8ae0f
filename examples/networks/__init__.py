"""Networks in plain JAX, for examples and benchmarks: NHWC, parameters as pytrees, no library of layers.

A network takes `Ops`: how it convolves and multiplies. `layers` has those of bf16, and what the networks share; with
others (those of `static`, say) the same network runs in FP8.

    params = resnet.init(normal(0))
    logits = resnet.apply(params, images)
"""
