"""What Triton kernels, written with Pallas, need: how one is launched (launch), a GPU to lower it for where there is
none (device), and arithmetic in inline PTX (instructions)."""
