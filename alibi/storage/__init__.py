"""Files and addresses: read, write whole, claim."""
