"""Transposes of FP8 tensors that give another dimension the place of the innermost one.

exchange (which transposes those are) → kernel, in Triton; primitive: the kernel on a Hopper GPU, elsewhere lax's own.
"""
