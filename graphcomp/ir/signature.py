"""Roles: what each input and output of a program is. Everything is addressed by role, never by position."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Role:
    """What a value at the border of a program stands for. Prints as one word and its argument."""


@dataclass(frozen=True)
class Param(Role):
    """A parameter, by the name that `named_parameters()` gives it; tied parameters have one."""

    name: str

    def __str__(self) -> str:
        return f"param {self.name}"


@dataclass(frozen=True)
class Shard(Role):
    """This data rank's rows of a parameter, padded so that every data rank has equally many."""

    name: str

    def __str__(self) -> str:
        return f"shard {self.name}"


@dataclass(frozen=True)
class Buffer(Role):
    """A buffer, by its original name, as it is when the microbatch begins."""

    name: str

    def __str__(self) -> str:
        return f"buffer {self.name}"


@dataclass(frozen=True)
class BatchLeaf(Role):
    """A tensor of the microbatch, by its path in the pytree."""

    path: str

    def __str__(self) -> str:
        return f"batch {self.path}"


@dataclass(frozen=True)
class Size(Role):
    """A size of the microbatch, a host integer: the symbol that stands for it."""

    symbol: str

    def __str__(self) -> str:
        return f"size {self.symbol}"


@dataclass(frozen=True)
class Captured(Role):
    """A tensor that user code reaches in another way (closure, attribute); read anew at each step."""

    name: str

    def __str__(self) -> str:
        return f"captured {self.name}"


@dataclass(frozen=True)
class Constant(Role):
    """A literal tensor that user code makes from Python numbers, such as `torch.tensor([1.0, 2.0])`."""

    name: str

    def __str__(self) -> str:
        return f"constant {self.name}"


@dataclass(frozen=True)
class Denominator(Role):
    """What a named loss is divided by: 0-dim, the token count of the whole step (microbatches, for a mean loss)."""

    loss: str

    def __str__(self) -> str:
        return f"denominator {self.loss}"


@dataclass(frozen=True)
class LossScale(Role):
    """The gradient of the objective itself: 0-dim, 1 unless the trainer scales the loss."""

    def __str__(self) -> str:
        return "loss_scale"


@dataclass(frozen=True)
class Seed(Role):
    """The seed of one microbatch: 0-dim int64 on the host; random nodes derive their stream from it."""

    def __str__(self) -> str:
        return "seed"


@dataclass(frozen=True)
class Activation(Role):
    """Value `index` of the boundary from one stage to a neighbour; `target < source` carries gradients."""

    source: int
    target: int
    index: int

    def __str__(self) -> str:
        return f"{'activation' if self.source < self.target else 'gradient'} {self.source}>{self.target}[{self.index}]"


@dataclass(frozen=True)
class Saved(Role):
    """A value that a stage's forward keeps for its backward."""

    index: int

    def __str__(self) -> str:
        return f"saved {self.index}"


@dataclass(frozen=True)
class Grad(Role):
    """The gradient of a parameter, or this stage's share of it when several stages use the parameter."""

    name: str

    def __str__(self) -> str:
        return f"grad {self.name}"


@dataclass(frozen=True)
class Accumulator(Role):
    """What a parameter's gradient has come to over earlier microbatches. The `Grad` of the same name is the new sum;
    whoever runs the program may write it to the accumulator's memory."""

    name: str

    def __str__(self) -> str:
        return f"accumulator {self.name}"


@dataclass(frozen=True)
class Loss(Role):
    """The sum of a named loss over this microbatch, before any division; 0-dim."""

    name: str

    def __str__(self) -> str:
        return f"loss {self.name}"


@dataclass(frozen=True)
class Tokens(Role):
    """What this microbatch adds to the denominator of a named loss; 0-dim, from the batch alone."""

    loss: str

    def __str__(self) -> str:
        return f"tokens {self.loss}"


@dataclass(frozen=True)
class Metric(Role):
    """A metric's value for this microbatch; 0-dim; how microbatches are combined stands in the joint program."""

    name: str

    def __str__(self) -> str:
        return f"metric {self.name}"


@dataclass(frozen=True)
class BufferUpdate(Role):
    """What a buffer holds after this microbatch."""

    name: str

    def __str__(self) -> str:
        return f"update {self.name}"


@dataclass(frozen=True)
class Statistic(Role):
    """A value of a microbatch that the updates of a stage's buffers read, where these run behind the last one."""

    index: int

    def __str__(self) -> str:
        return f"statistic {self.index}"


@dataclass(frozen=True)
class Output(Role):
    """A tensor of the model's own output, by its path in the output pytree."""

    path: str

    def __str__(self) -> str:
        return f"output {self.path}"


AMBIENT = (Param, Buffer, BatchLeaf, Size, Captured, Constant, Denominator, LossScale, Seed)
"""Input roles that every stage can have without a message: state, batch, sizes and step inputs."""
