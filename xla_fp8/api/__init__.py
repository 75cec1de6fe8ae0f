"""The public functions, one file each. `xla_fp8.jit` is the function `xla_fp8.api.jit.jit`.

They have a package of their own because a module `xla_fp8.jit` would take the name of the function once it is imported.
"""
