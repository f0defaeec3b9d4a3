"""Attention by fused kernels of GPUs and TPUs."""
