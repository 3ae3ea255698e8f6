"""graphcomp turns the training step of an ordinary `nn.Module` into one compiled pipeline program."""

__version__ = "0.1.0"
