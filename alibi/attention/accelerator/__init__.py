"""What exists of attention for accelerators only: their own flash kernels, which get ALiBi as columns."""
