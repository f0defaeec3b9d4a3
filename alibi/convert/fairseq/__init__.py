"""Reading what the paper's own code (a fork of fairseq) writes."""
