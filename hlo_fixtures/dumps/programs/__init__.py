"""What the dumps are made of: JAX programs by kind, and HLO that no JAX program gives. See ../regenerate.py."""
