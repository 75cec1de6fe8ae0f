"""Kernels that compute tensors row by row and write them as FP8: norms, activations, gates, their gradients, and the
cast behind them, with what training needs beside the FP8 tensor.

problem (what is computed) → tiling (how it is cut into programs) → kernel, which loads tiles (loads), computes their
values (values) node by node (arithmetic), stores tensors and numbers of rows (results), and adds up amaxes and sums by
column (parts). statistics is the kernel in front of it that makes the sums of a group norm, or makes them for others.
support says which problems there are kernels for. Problems are made of a program's equations by
`xla_fp8.tracing.fused_casts`.
"""
