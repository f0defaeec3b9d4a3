"""Computation that exists for XLA on CPUs."""
