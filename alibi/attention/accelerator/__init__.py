"""Attention in fused kernels for GPUs and TPUs."""
