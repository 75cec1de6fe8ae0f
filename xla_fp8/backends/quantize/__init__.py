"""Kernels that make FP8 tensors on Hopper GPUs: x → (data, transposed, scale, amax), bit by bit what plain JAX makes.

request (what is asked, and what no kernel does) → work (how a tensor is cut into pieces) → kernels (amax, cast) → one
file for each algorithm: atomic, reduction, single_pass → choice (which one "auto" means).

The kernels are Triton's, written with Pallas. All arithmetic is that of the request's `rule`.
"""
