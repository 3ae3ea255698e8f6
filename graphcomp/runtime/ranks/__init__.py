"""Who stands where, and how all ranks come to agree on what they do."""
