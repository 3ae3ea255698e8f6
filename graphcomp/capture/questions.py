"""What code can want to know of the contents of a tensor while it is traced, and what to write in its place."""

from __future__ import annotations

from dataclasses import dataclass

from graphcomp.compat.symbols import ASKS_SIZE, DATA_DEPENDENT, asked_operator


@dataclass(frozen=True)
class Question:
    """got: what the code does. do: the remedy."""

    got: str
    do: str


_RUN_TIME = Question(
    "it decides in Python on a number that is known only when the program runs: of x[mask], nonzero, .item(), an exact "
    "all_to_all; or makes a plain number of it: int(x), range(n), x[n]",
    "write it for any number of rows, without asking: operations take tensors of one row and of none; as a size use "
    "x.item() itself, not int(x); loop over all experts, not over those that are hit",
)
_NUMBER = Question(
    "it reads a number out of a tensor: .item(), .tolist(), float(x), bool(x) or a plain `if x:`",
    "keep it a tensor: torch.where(condition, a, b) in place of `if condition`, masks in place of loops, 0-dim tensors "
    "in place of .item(), float() and .tolist(); or compute the number in the loader and pass it as a batch field",
)
_CHOICE = Question(
    "it picks elements by a mask without dimensions",
    "torch.where(mask, x, 0), or x.masked_fill(~mask, 0), keeps all elements",
)
_UNIQUE = Question(
    "it asks for the different rows of a tensor (unique with dim=), and how many there are depends on its contents",
    "give each row one number and ask for the different numbers: torch.unique(x @ radix, return_inverse=True); or "
    "number the rows in the loader and pass the result as a batch field",
)
_LEAST_SQUARES = Question(
    "it asks for the residuals of a least squares solution, and how many there are depends on the rank of the matrix",
    "torch.linalg.pinv(A) @ B; or, for a matrix of full rank, torch.linalg.qr(A) and torch.linalg.solve_triangular",
)
_PACKED = Question(
    "it packs a padded sequence, and how long the result is depends on the contents of the lengths",
    "run the layer on the padded batch and mask its results; gather the last valid step by its index",
)

_QUESTIONS = {
    "aten::nonzero": _CHOICE,
    "aten::masked_select": _CHOICE,
    "aten::index": _CHOICE,
    "aten::index_put": _CHOICE,
    "aten::unique_consecutive": _UNIQUE,
    "aten::_unique": _UNIQUE,
    "aten::unique_dim": _UNIQUE,
    "aten::unique_dim_consecutive": _UNIQUE,
    "aten::linalg_lstsq": _LEAST_SQUARES,
    "aten::_pack_padded_sequence": _PACKED,
}


# What torch says where no operator is asked.
_BY_TEXT = {
    ".numpy() is not supported for tensor subclasses": Question(
        "it takes the contents of a tensor out with .numpy()",
        "compute with operations of torch; what NumPy has to do belongs into the loader, as a batch field",
    ),
    "(got SymInt)": _RUN_TIME,
    "its data is not allocated yet": Question(
        "it makes a tensor of the contents of others, as torch.tensor([a, b]) does",
        "torch.stack([a, b]), which keeps gradients too",
    ),
}


def question_of(error: BaseException) -> Question | None:
    """What was asked of a tensor, if that is what an error is about."""
    if isinstance(error, ASKS_SIZE):
        return _RUN_TIME
    if isinstance(error, DATA_DEPENDENT):
        return _QUESTIONS.get(asked_operator(error), _NUMBER)
    text = str(error)
    return next((question for words, question in _BY_TEXT.items() if words in text), None)
