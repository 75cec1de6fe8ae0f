"""The benchmark of whole networks on a GPU: FP8 through `xla_fp8.jit` beside `jax.jit` in FP8 and in bf16.

    python -m benchmarks.models run --seconds 250             every row, each in a process of its own
    python -m benchmarks.models run --only resnet50           rows whose name has one of these parts, by ";"
    python -m benchmarks.models run --variants bf16,auto      of these contestants alone
    python -m benchmarks.models report                        table and plot of results.json, anywhere
    python -m benchmarks.models docs --out FOLDER             puts them into docs/benchmarks.md
    python -m benchmarks.models lower                         lowers rows for CUDA, on a machine without a GPU
    ... --tiny                                                small networks, on any machine: does it work?

A row is a network, a batch, inference or a training step, and a variant: `bf16`, or a recipe (`static`, `delayed`,
`dynamic`) with who compiles it: `xla` is `jax.jit`, `auto` and `mosaic` are `xla_fp8.jit` with that backend.

Few rows compile on a GPU side by side (`--workers`): XLA times its candidates while it compiles, and with 26 processes
it chose convolutions that were six times slower than others. When a batch is compiled its rows are timed and profiled,
one at a time, nothing else on their GPU: what is late is ended, and begins again at the end. GPUs are those that
CUDA_VISIBLE_DEVICES names; the variants of a case are all on one. Another run in the same folder does what is left.

XLA takes up to 20 s on one core to tune an FP8 convolution, of which a network has dozens; its first choice, without
tuning, is one that cuDNN cannot run: `--chain-seconds 60` lets many processes tune them on the last GPU at first, and
nothing else; XLA keeps what it found by instruction. `tune` does that alone.

The files: `rows` → `programs` (with `recipes`) → `worker` (with `timing`, `profile`) → `scheduler` → `table`, `plot`.
"""
