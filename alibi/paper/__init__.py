"""The paper's 15 tables: what each cell is, what it takes to measure it, and our numbers beside the published ones."""
