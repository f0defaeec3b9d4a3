"""The paper's 15 tables: their cells, the plan of their runs, and our numbers beside the
published ones.
"""
