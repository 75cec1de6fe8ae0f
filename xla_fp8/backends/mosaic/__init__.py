"""Our own FP8 convolution for Hopper, an implicit GEMM in Pallas Mosaic GPU. `backend.MosaicBackend` is the way in."""
