"""Files and addresses: read, write whole, create once, claim."""
