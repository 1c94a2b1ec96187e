"""The cells of every table, in the order of the page."""

import module_cells
import torchrl_loss_cells

CELLS = [*torchrl_loss_cells.CELLS, *module_cells.CELLS]
