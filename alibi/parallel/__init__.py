"""Several hosts and devices as one: who speaks, and what all hosts agree on."""
