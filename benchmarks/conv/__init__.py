"""The benchmark of FP8 convolutions on a Hopper GPU: this project's backends beside XLA's own convolutions.

    python -m benchmarks.conv tune --out build/conv --seconds 480       every visible GPU; resumable
    python -m benchmarks.conv measure --out build/conv --seconds 400    one process, no tuning; resumable
    python -m benchmarks.conv variants --only NAMES --configs 8         some rows, tuned and measured in one go
    python -m benchmarks.conv report --out build/conv                   the tables and plots of results.json, anywhere
    python -m benchmarks.conv lower                                     no GPU: lowers every program for cuda
    ... --tiny                                                          small shapes, on any machine: does it work?

Tuning takes XLA 20 s a convolution, in which the GPU does next to nothing; so it is a phase of its own, in many
processes. What it leaves is JAX's compilation cache, with XLA's choices in it, and this project's cache of choices.
Then one process measures everything there, contestants in turn.

The files: `shapes` → `programs` (a shape, an epilogue and a contestant make a program) → `tune` and `worker` →
`timing` → `measure`, or `rows` and `variants` → `report`. `clocks` watches what the GPU does meanwhile.
"""
