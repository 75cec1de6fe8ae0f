"""High precision → FP8: quantize, the Float8 array, its matmul, and contractions that train.

numerics (amax → scale) → algorithms (who computes it) → quantize → Float8 → dot_general; and, with derivatives,
fake_quantize, fp8_dot and fp8_conv (training) with delayed scaling. The public names are those of `xla_fp8`.
"""
