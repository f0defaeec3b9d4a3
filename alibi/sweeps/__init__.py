"""Sweeps: the runs of an experiment, trained, evaluated and reported together, and continued after
a stop.
"""
