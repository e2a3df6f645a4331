"""Tasks: the contract, the registry, and one module for each task. A task knows nothing of models."""
