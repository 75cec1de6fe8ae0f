"""Kernels that compute a tensor row by row and write it as FP8: norms, activations, gates, and the cast behind them."""
