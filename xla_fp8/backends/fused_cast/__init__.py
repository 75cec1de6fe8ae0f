"""Kernels that compute a tensor row by row and write it as FP8: norms, activations, gates, and the cast behind them.

problem (what is computed, and how it is cut) → kernel, which loads tiles (loads), computes node by node (arithmetic)
and stores FP8. statistics is the kernel in front of it that makes the sums of a group norm. Problems are made of a
program's equations by `xla_fp8.tracing.fused_casts`.
"""
