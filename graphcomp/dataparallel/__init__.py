"""Data parallelism: step programs that gather parameters and reduce their gradients over data ranks."""
