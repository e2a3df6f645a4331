"""A memory system outside the package: register it, test it with the shared test matrix, train it, compare it.

python examples/04_own_memory_system.py [folder for the runs]

As a plugin of the command line, from the folder of this file:

PYTHONPATH=. EXPIRE_SPAN_PLUGINS=04_own_memory_system expire-span compare recall --mixers fading_mean,gru
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from expire_span import MemorySystem, Mixer, MixerAux, MixerOutput, register
from expire_span.models.systems.contract import Budget


@dataclass(frozen=True)
class FadingMeanConfig:
    """One vector per layer: the mean of all past inputs, where each step weighs less than the next."""

    kind: Literal["fading_mean"] = "fading_mean"
    half_life: float = 16.0
    """Steps after which an input has half its weight."""


class FadingMean(Mixer):
    """State {"mean": [B, C]}: m_t = f m_(t-1) + (1 - f) V x_t, and y_t = O m_t."""

    settings_class = FadingMeanConfig

    def __init__(self, *shape: Any, **options: Any) -> None:
        super().__init__(*shape, **options)
        self.value = nn.Linear(self.shape.dim, self.shape.dim, bias=False)
        self.out = nn.Linear(self.shape.dim, self.shape.dim, bias=False)

    def initial_state(self, batch: int, keep: Any = "kv", *, empty: Tensor | None = None) -> dict[str, Tensor]:
        return {"mean": self.value.weight.new_zeros(batch, self.shape.dim)}

    def reset_rows(self, state: dict[str, Tensor], fresh: Tensor, *, empty: Tensor | None = None) -> dict[str, Tensor]:
        return {"mean": state["mean"].masked_fill(fresh.to(state["mean"].device).unsqueeze(1), 0)}

    def mix(self, x: Tensor, state: dict[str, Tensor]) -> MixerOutput:
        fade, mean, steps = 0.5 ** (1 / self.settings.half_life), state["mean"], []
        for v in self.value(x).unbind(1):
            mean = fade * mean + (1 - fade) * v
            steps.append(mean)
        after = {"mean": mean.detach().clone()}
        held = mean.numel() * mean.element_size()
        aux = MixerAux(live=torch.ones((), device=x.device), bytes_held=held)
        return MixerOutput(self.out(torch.stack(steps, 1)), after, aux)


register(
    MemorySystem(
        FadingMeanConfig,
        f"{__name__}:FadingMean",
        state="dim x e",
        held=lambda size, steps: size.shape.dim * size.element,
        cost="O(T dim)",
        budget=Budget("none: one vector"),
        scores_pairs=False,
        example={"half_life": 4.0},
    )
)


def main(folder: Path) -> None:
    from expire_span.recipes import recall
    from expire_span.testing import check_system
    from expire_span.train.supervised import train

    check_system("fading_mean")
    print("the shared test matrix holds: causal, pieces of any size, gradients, reset, independent rows, saving, bytes")
    recipe = recall()
    task = replace(recipe.task, min_length=2, max_length=6, distractor_prob=0.0, blank_prob=0.0)
    model = replace(recipe.model, mixer=FadingMeanConfig(half_life=32.0))
    config = replace(recipe, task=task, model=model, train=replace(recipe.train, steps=60, eval_every=60))
    run = train(config, folder / "fading", shown=False)
    score = (run.read_result() or {})["score"]
    print(f"trained on short corridors: {score:.0%} of the colours recalled by a fading mean")
    assert score > 0.5


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary))
