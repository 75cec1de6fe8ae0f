"""The compiler passes, HLO in and HLO out; installed as `xla_fp8.passes`."""
