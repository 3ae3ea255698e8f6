"""What a step divides by, and what it reports."""
