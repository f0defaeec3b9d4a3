"""Products, sums and kernels that every room uses. Each knows what is fast on which platform."""
