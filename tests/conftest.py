"""Shared by all tests: one thread per worker, so that two workers share two cores fairly; kernels for the interpreter."""

import importlib.util
import os

import torch

if importlib.util.find_spec("triton") is not None:
    from tests import triton_interpreter  # noqa: F401  (before any other test defines a kernel)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
