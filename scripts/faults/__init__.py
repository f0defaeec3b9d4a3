"""What scripts/fault_test.py is made of: trials, the faults that befall them, and disks that are full or read-only."""
