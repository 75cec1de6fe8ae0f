"""Depthwise convolutions on Hopper GPUs, in the model's own precision: what a network in FP8 leaves to cuDNN otherwise.

convolution (as JAX programs write it) → problem (shapes, and what no kernel does) → forward (and the input's gradient,
which is a forward convolution too) and filter_gradient: one kernel each. primitive decides between them and lax.
"""
