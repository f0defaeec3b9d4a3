"""The paper's 15 tables: which runs and evaluations each one is made of, what they cost, and our numbers beside its."""
