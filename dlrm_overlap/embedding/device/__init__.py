"""What the backends on GPUs share: tables of addresses for kernels, made from a layout and this rank's rows."""
