"""A cell of the compatibility matrix: one of our parts beside one of TorchRL's, and what has to hold.

The cells are data: ``test_compatibility.py`` runs each, ``page.py`` writes ``docs/compatibility.md`` from them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Cell:
    """One pair of parts.

    Attributes:
        table: heading of the table that the cell stands in.
        row: our part, or the variant of it.
        column: TorchRL's part.
        run: uses both and asserts the right result; of a refused cell it has to raise.
        refused: why the pair is refused, for a reader who wanted it; empty where it works.
        says: words that the error of a refused pair contains.
        mark: marker of pytest, such as "gpu".
        elsewhere: whether another test file runs the cell, with inputs of its own; the page prints it.
        untried: why nobody tries the pair here; empty where a test does.
    """

    table: str
    row: str
    column: str
    run: Callable[[], None]
    refused: str = ""
    says: str = "Remedy"
    mark: str = ""
    elsewhere: bool = False
    untried: str = ""

    @property
    def name(self) -> str:
        """Identifies the cell in a test's name."""
        return f"{self.row} + {self.column}"

    def check(self) -> None:
        """Runs the cell and asserts what it promises."""
        if not self.refused:
            self.run()
            return
        with pytest.raises(
            (ValueError, TypeError, NotImplementedError, RuntimeError, KeyError, AttributeError), match=self.says
        ):
            self.run()


def differentiate(losses: dict[str, Tensor], parameters: dict[str, nn.Parameter]) -> None:
    """Asserts that the losses are finite and that together they move every parameter that can learn."""
    total = sum(value for key, value in losses.items() if key.startswith("loss"))
    assert isinstance(total, Tensor)
    assert total.isfinite(), losses
    total.backward()
    still = [name for name, p in parameters.items() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert not still, f"no gradient reached {still}"
    unreal = [name for name, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()]
    assert not unreal, f"the gradient of {unreal} is not finite"


def no_cells_twice(cells: list[Cell]) -> list[Cell]:
    """The cells, which must differ in their names."""
    names = [(cell.table, cell.name) for cell in cells]
    assert len(set(names)) == len(names), sorted({name for name in names if names.count(name) > 1})
    return cells


def fixed_seed() -> None:
    """The same networks and draws in each cell, whichever ran before."""
    torch.manual_seed(0)
