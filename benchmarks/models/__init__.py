"""The benchmark of whole networks on a GPU: FP8 through `xla_fp8.jit` beside `jax.jit` in FP8 and in bf16.

    python -m benchmarks.models run --seconds 540             every row, each in a process of its own
    python -m benchmarks.models run --only resnet50           rows whose name has one of these parts, by ";"
    python -m benchmarks.models run --variants bf16,auto      of these contestants alone
    python -m benchmarks.models tune --xla-fp8-autotune 4     XLA's FP8 convolutions, in many processes; then run with
        --xla-fp8-autotune 4 --keep-autotune --variants xla
    python -m benchmarks.models report                        table and plot of results.json, anywhere
    ... --tiny                                                small networks, on any machine: does it work?

A row is a network, a batch, inference or a training step, and a variant: `bf16`, or a recipe (`static`, `delayed`,
`dynamic`) with who compiles it: `xla` is `jax.jit`, `auto` and `mosaic` are `xla_fp8.jit` with that backend.

All rows are compiled first, side by side; then, one at a time and nothing else running, each is timed and profiled.
What is not compiled when that begins is given up. Another run in the same folder does what is left. XLA takes some 20 s
on one core to tune an FP8 convolution, of which a network has dozens: its FP8 is compiled at level 0 of autotuning, its
first choice, unless `--xla-fp8-autotune 4` says otherwise; the table says which. With `--keep-autotune` XLA keeps what
it found; `tune` has it find that beforehand.

The files: `rows` → `programs` (with `recipes`) → `worker` (with `timing`, `profile`) → `scheduler` → `table`, `plot`.
"""
