"""What code can want to know of the contents of a tensor while it is traced, and what to write in its place."""

from __future__ import annotations

from dataclasses import dataclass

from graphcomp.compat.symbols import ASKS_SIZE, DATA_DEPENDENT, asked_operator


@dataclass(frozen=True)
class Question:
    """got: what the code does. do: the remedy."""

    got: str
    do: str


_NUMBER = Question(
    "it reads a number out of a tensor: .item(), .tolist(), int(x), float(x), bool(x) or a plain `if x:`",
    "keep it a tensor: torch.where(condition, a, b) in place of `if condition`, masks in place of loops, 0-dim tensors "
    "in place of .item(), float() and .tolist(); or compute the number in the loader and pass it as a batch field",
)
_CHOICE = Question(
    "it picks elements by their contents, and how many depends on these: x[mask], nonzero, one-argument where",
    "keep all elements and weight them by the mask: (x * mask).sum() / mask.sum(), torch.where(mask, x, 0), "
    "x.masked_fill(~mask, 0); or pass the indices, padded to a fixed number, as a batch field",
)
_UNIQUE = Question(
    "it asks for the different values in a tensor, and how many there are depends on its contents",
    "number the values in the loader and pass the result as a batch field; or count all possible values: "
    "torch.nn.functional.one_hot(x, classes).sum(0) > 0",
)
_REPEATS = Question(
    "it repeats elements as often as a tensor says, and how many that makes depends on its contents",
    "give repeat_interleave(..., output_size=n) the number of results, such as the length of a batch field; "
    "or make the indices in the loader and gather with them",
)
_COUNT = Question(
    "it counts values with bincount, whose number of results depends on the largest of them",
    "torch.nn.functional.one_hot(x, classes).sum(0), or torch.zeros(classes).index_add(0, x, weights), counts a fixed "
    "number of classes",
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
    "aten::_unique2": _UNIQUE,
    "aten::_unique": _UNIQUE,
    "aten::unique_dim": _UNIQUE,
    "aten::unique_consecutive": _UNIQUE,
    "aten::unique_dim_consecutive": _UNIQUE,
    "aten::repeat_interleave": _REPEATS,
    "aten::bincount": _COUNT,
    "aten::_pack_padded_sequence": _PACKED,
}


# What torch says where no operator is asked.
_BY_TEXT = {
    ".numpy() is not supported for tensor subclasses": Question(
        "it takes the contents of a tensor out with .numpy()",
        "compute with operations of torch; what NumPy has to do belongs into the loader, as a batch field",
    ),
    "its data is not allocated yet": Question(
        "it makes a tensor of the contents of others, as torch.tensor([a, b]) does",
        "torch.stack([a, b]), which keeps gradients too",
    ),
}


_RUN_TIME = Question(
    "it decides on a size that is known only when the program runs, such as how many rows an exact all_to_all brings",
    "write it for any number of rows, without asking: operations take tensors of one row and of none; or declare a "
    "capacity, all_to_all(..., capacity=...), whose sizes are known",
)


def question_of(error: BaseException) -> Question | None:
    """What was asked of a tensor, if that is what an error is about."""
    if isinstance(error, ASKS_SIZE):
        return _RUN_TIME
    if isinstance(error, DATA_DEPENDENT):
        return _QUESTIONS.get(asked_operator(error), _NUMBER)
    text = str(error)
    return next((question for words, question in _BY_TEXT.items() if words in text), None)
