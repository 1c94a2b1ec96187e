"""A rank that ``torchrun`` has started: ``torchrun_check.py CHECK``, a function of ``rank_checks``."""

import os
import sys

import torch

sys.path.insert(0, os.path.dirname(__file__))

import rank_checks

if __name__ == "__main__":
    torch.set_num_threads(1)
    getattr(rank_checks, sys.argv[1])()
