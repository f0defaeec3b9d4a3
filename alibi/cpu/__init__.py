"""Computations written for XLA on CPUs; `alibi.attention.backends` and `alibi.cpu.products` choose
them.
"""
