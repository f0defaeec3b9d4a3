"""What exists of attention for CPUs only: short attention that keeps its exponentials, and decoding a token."""
