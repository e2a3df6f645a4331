"""Seeds and the states of all random generators, as JSON values and tensors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """The same seed on every process: noise inside the model must agree between them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def host_state() -> dict[str, Any]:
    """Python's and NumPy's generators as JSON values."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {"python": [version, list(words), gauss], "numpy": [str(name), np.asarray(keys).tolist(), *rest]}


def load_host_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def torch_state() -> dict[str, Any]:
    """Torch's generators: the host's, and the current GPU's where there is one in use."""
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return {"cpu": torch.get_rng_state(), "cuda": gpu}


def load_torch_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
