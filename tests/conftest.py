"""Shared by all tests: one thread per worker, so that two workers share two cores fairly."""

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
