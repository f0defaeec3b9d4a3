"""A run on several devices and hosts: shardings, and agreement between processes."""
