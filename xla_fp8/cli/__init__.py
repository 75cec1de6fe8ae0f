"""The command line: `xla-fp8`, one file for each of its commands."""
