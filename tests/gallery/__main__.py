"""Survey every model of the gallery and write the page: python -m tests.gallery docs/gallery.md"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

from graphcomp.testing import Survey, survey
from tests.gallery.models import ENTRIES, Entry

HEAD = f"""# Gallery

Models as their authors wrote them, captured and cut without a line of code made for any of them.

Written by `make gallery`, which runs `python -m tests.gallery docs/gallery.md`; this time on CPU with
torch {torch.__version__.partition("+")[0]} and transformers {transformers.__version__}.

`tests/gallery/models.py` builds each model from the library's own class at a tiny size, with random weights and no
dropout. `graphcomp.testing.survey` captures it once, with symbolic sizes, and runs all its stages in one process at 1,
2 and 4 stages, on two microbatches of unequal size. Loss, every gradient and every buffer are compared with eager
PyTorch. Try your own model in the same way:

<!-- no-run -->
```python
from graphcomp.testing import survey

print(survey(model, loss_fn, microbatches, stages=(1, 2, 4)))
```

- *nodes*: operations of the joint program: forward, loss and backward.
- *difference*: the largest relative difference of any loss, gradient or buffer, at any number of stages.
- *tied*: whether a weight with several names stayed one, with one gradient.
- *crosses at 2 stages*: the values that are sent forward, and the gradients that come back, for each microbatch.
- *captures*: how many programs the two microbatches needed (code that loops over a length needs one for each), and
  how long capturing took on the machine that wrote this page.

| model | class | nodes | equal to eager at | difference | tied | crosses at 2 stages | captures |
| --- | --- | ---: | --- | ---: | --- | --- | ---: |
"""


def line(entry: Entry, found: Survey) -> str:
    equal = ", ".join(map(str, found.stages)) + (" stages" if found.stages else "")
    cells = [
        entry.name,
        f"`{entry.source}`",
        found.nodes,
        f"{equal}; refused at {found.refused}" if found.refused else equal,
        f"{found.error:.0e}" if found.error else "0",
        {None: "", True: "yes", False: "**lost**"}[found.tied],
        "; ".join(_sent(found, source) for source in (0, 1)),
        f"{found.captures} in {found.seconds:.1f} s",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _sent(found: Survey, source: int) -> str:
    """What the stage sends at 2 stages, equal values counted."""
    values = [
        value.partition(": ")[2]
        for one in found.crossings
        if (one.stages, one.source) == (2, source)
        for value in one.values
    ]
    counts = {value: values.count(value) for value in values}
    texts = [f"{count} x `{value}`" if count > 1 else f"`{value}`" for value, count in counts.items()]
    return f"{'back ' if source else ''}{' '.join(texts) or 'nothing'}"


def main(path: Path) -> int:
    lines, passed = [], True
    for entry in ENTRIES:
        found = survey(entry.build(), entry.loss_fn, entry.microbatches(), name=entry.name)
        print(found, flush=True)
        lines.append(line(entry, found))
        passed = passed and found.passed
    path.write_text(HEAD + "\n".join(lines) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
