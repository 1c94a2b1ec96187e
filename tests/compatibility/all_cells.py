"""The cells of every table, in the order of the page."""

import env_cells
import loss_cells
import module_cells
import replay_cells
import torchrl_loss_cells
from cells import Cell

CELLS: list[Cell] = [
    *torchrl_loss_cells.CELLS,
    *module_cells.CELLS,
    *loss_cells.CELLS,
    *replay_cells.CELLS,
    *env_cells.CELLS,
]
