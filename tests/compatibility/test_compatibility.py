"""Every cell of docs/compatibility.md holds, and the page says what the cells say."""

import pytest
from all_cells import CELLS
from page import PAGE, page


@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")  # one loss of one batch updates none
@pytest.mark.filterwarnings("ignore:The name target_actor_network_params:UserWarning")  # TorchRL's BCLoss
@pytest.mark.parametrize("cell", CELLS, ids=[cell.name for cell in CELLS])
def test_cell(cell):
    cell.check()


def test_page_is_made_of_the_cells():
    written = PAGE.read_text(encoding="utf-8")
    assert written == page(), "docs/compatibility.md is out of date. Remedy: python tests/compatibility/page.py"
