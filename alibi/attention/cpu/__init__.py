"""Attention written for XLA on CPUs."""
