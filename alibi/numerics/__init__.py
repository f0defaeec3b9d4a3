"""Products, sums and kernels that every room uses; each knows what is fast on which platform."""
