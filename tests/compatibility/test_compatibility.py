"""Every cell of docs/compatibility.md holds, and the page says what the cells say."""

import pytest
from all_cells import CELLS
from env_cells import COLLECTOR_TABLE, ENV_TABLE
from page import PAGE, page

TRIED = [cell for cell in CELLS if not (cell.elsewhere or cell.untried)]


def case(cell):
    marks = [getattr(pytest.mark, cell.mark)] if cell.mark else []
    if cell.table in (ENV_TABLE, COLLECTOR_TABLE):
        marks.append(pytest.mark.filterwarnings("ignore"))  # TorchRL's transforms warn of each other's retired names
    return pytest.param(cell, marks=marks, id=cell.name)


@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")  # one loss of one batch updates none
@pytest.mark.filterwarnings("ignore:The name target_actor_network_params:UserWarning")  # TorchRL's BCLoss
@pytest.mark.filterwarnings("ignore:.*Trainer is an experimental:UserWarning")
@pytest.mark.filterwarnings("ignore:The '.*' hook stage:FutureWarning")
@pytest.mark.parametrize("cell", [case(cell) for cell in TRIED])
def test_cell(cell):
    cell.check()


def test_page_is_made_of_the_cells():
    written = PAGE.read_text(encoding="utf-8")
    assert written == page(), "docs/compatibility.md is out of date. Remedy: python tests/compatibility/page.py"
