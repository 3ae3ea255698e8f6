"""How a failure on one rank becomes an error on all."""
