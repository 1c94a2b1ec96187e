"""Each cell of the tables of envs, transforms and collector passes, or is refused as the table says."""

import pytest
from env_cells import COLLECTOR_CELLS, ENV_CELLS, run_collector_cell, run_env_cell

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("cell", ENV_CELLS, ids=lambda cell: cell.name)
def test_env_below_a_transform(cell):
    if not cell.refused:
        return run_env_cell(cell)
    with pytest.raises(Exception, match=r"\w"):
        run_env_cell(cell)


@pytest.mark.parametrize("cell", COLLECTOR_CELLS, ids=lambda cell: cell.name)
def test_collector_gives_what_torchrl_gives(cell):
    if not cell.refused:
        return run_collector_cell(cell)
    with pytest.raises(Exception, match=r"\w"):
        run_collector_cell(cell)
