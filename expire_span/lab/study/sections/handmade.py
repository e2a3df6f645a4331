"""Sections on memories with weights set by hand: first the numbers, then the text and pictures that use them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from expire_span.lab.study import counter, gating, leaky, pictures, sensitivity, tanh_stack
from expire_span.lab.study.exercise import TASK
from expire_span.lab.study.page import Section
from expire_span.models.systems.recurrent.gated import GatedCell
from expire_span.tasks.entrances import Series, count_entrances

SHOWN = 60
"""Number of steps of the series in the pictures."""
LONG = 2000
"""Number of steps of the series on which the hand-made gated counter is tested."""
LATER = 60
"""Number of steps over which sensitivity is measured."""
GATES = (0.0, 0.01, 0.1)
"""Openings of the gates in the sensitivity picture."""


def sample_series(length: int = SHOWN, number: int = 3) -> np.ndarray:
    return Series(TASK, "test", 0).whole(np.array([number]), length)[0]


def curves() -> dict[str, np.ndarray]:
    """Sensitivity of a tanh cell and of gated cells with different openings."""
    found = {"tanh, shrinking by 0.9": sensitivity.sensitivity(sensitivity.tanh_step(), LATER)}
    for gate in GATES:
        name = "gate shut" if gate == 0 else f"gate {gate:.0%} open"
        found[name] = sensitivity.sensitivity(sensitivity.gated_step(gate), LATER)
    return found


def two_grus(steps: int = 40, seed: int = 0) -> dict[str, np.ndarray]:
    """States of the first unit of `GatedCell` and of torch.nn.GRU with the same weights, and of torch.nn.GRU with z
    inverted."""
    torch.manual_seed(seed)
    ours, theirs, changed = GatedCell(1, 4), nn.GRU(1, 4, batch_first=True), nn.GRU(1, 4, batch_first=True)
    x = 2 * torch.randn(1, steps, 1)
    with torch.no_grad():
        copy_weights(ours, theirs, keep=1)
        copy_weights(ours, changed, keep=-1)
        traces = ours(x, torch.zeros(1, 4))[0], theirs(x)[0], changed(x)[0]
    names = ("the post's", "torch.nn.GRU", "torch.nn.GRU with z turned round")
    return {name: trace[0, :, 0].numpy() for name, trace in zip(names, traces)}


def copy_weights(ours: GatedCell, theirs: nn.GRU, keep: int) -> None:
    """Copy the weights of a `GatedCell` to torch's GRU; keep = -1 negates its update gate, so that z means the same in both."""
    units = ours.candidate.in_features
    z, r, c = ours.input.weight.split(units)
    bz, br, bc = ours.input.bias.split(units)
    uz, ur = ours.gates.weight.split(units)
    weights = {"weight_ih_l0": [r, keep * z, c], "bias_ih_l0": [br, keep * bz, bc]}
    weights["weight_hh_l0"] = [ur, keep * uz, ours.candidate.weight]
    state = {name: torch.cat(parts) for name, parts in weights.items()}
    theirs.load_state_dict({**state, "bias_hh_l0": torch.zeros_like(state["bias_ih_l0"])})


def measure_all() -> dict[str, Any]:
    """All numbers that the sections' texts mention."""
    long = sample_series(LONG)
    counted = gating.read_count(gating.run_counter(long[None]))[0]
    leak, falls, grus = leaky.sweep(), curves(), two_grus()
    inside, outside = (tanh_stack.detect(np.array(x)) for x in ([0.2, 0.5, 0.8], [-2.0, -0.2, 1.2, 3.0]))
    ours, theirs, turned = grus.values()
    return {
        "stack": {"inside": float(inside.min()), "outside": float(np.abs(outside).max())},
        "stack_post_sign": {"inside": float(np.abs(tanh_stack.detect(np.array([0.5]), sign=-1)[0]))},
        "leaky": {"ratio": leaky.RATIOS.tolist(), "increment": leak[:, 0].tolist(), "retention": leak[:, 1].tolist()},
        "half_life": {name: sensitivity.half_life(x) if x[-1] < x[0] else None for name, x in falls.items()},
        "left_after": {name: float(x[-1] / x[0]) for name, x in falls.items()},
        "gru_difference": {
            "as_given": float(np.abs(ours - theirs).max()),
            "z_turned": float(np.abs(ours - turned).max()),
        },
        "long_series": {
            "steps": LONG,
            "entrances": int(count_entrances(long)[-1]),
            "wrong": float((counted != count_entrances(long)).mean()),
        },
    }


def draw_all(numbers: dict[str, Any]) -> list[Section]:
    return [
        _counter(),
        _family(),
        _stack(numbers),
        _leak(numbers),
        _sensitivity(numbers),
        _gates(),
        _grus(numbers),
        _gated(numbers),
    ]


def _counter() -> Section:
    values = sample_series()
    rows = counter.run_counter(values)
    text = (
        "Two units are enough when one may write them down: the first is 1 while the series is inside, the second "
        "adds one where the first goes from 0 to 1. It is exact on every series, however long."
    )
    caption = (
        f"{SHOWN} steps with {rows[1, -1]} entrances. Shaded: the interval. The lower strip changes exactly at the "
        "left edges of the upper one."
    )
    return Section("A counter made by hand", text, [(caption, pictures.draw_counter(values, rows))])


def _family() -> Section:
    text = (
        "A learned network may not write rules; its atom is tanh of a weighted sum of input and state. Each is a "
        "slope in one direction of the plane: between -1 and 1, and monotone along its direction. None of them alone "
        "can tell a middle."
    )
    caption = "Columns: the direction of the weighted sum. Rows: how steep it is."
    return Section("The atom", text, [(caption, pictures.draw_family(np.linspace(-1, 1, 81)))])


def _stack(numbers: dict[str, Any]) -> Section:
    found, wrong = numbers["stack"], numbers["stack_post_sign"]
    text = (
        "Two monotone units, one for above 0 and one for below 1, and a third that adds them: a detector of the "
        f"interval. It gives at least {found['inside']:.3f} at 0.2, 0.5 and 0.8, and at most {found['outside']:.3f} "
        "from a fifth outside on. The bias of the second unit must be positive. The post that this study follows "
        f"writes it negative; then the stack gives {wrong['inside']:.3f} in the middle of the interval and -0.96 on "
        "[-1, 0]."
    )
    figure = pictures.draw_stack(np.linspace(-2.5, 2.5, 501))
    return Section("Two slopes make an interval", text, [("Slope a = 20. Shaded: the interval.", figure)])


def _leak(numbers: dict[str, Any]) -> Section:
    table = np.stack([numbers["leaky"]["increment"], numbers["leaky"]["retention"]], 1)
    text = (
        "h = tanh(w1 h' + w2 g) adds the detector g to what it holds. With w1 / w2 = 1/8 one step inside moves it by "
        f"{table[0, 0]:.2f}, but nothing is left ten steps later; with 32 it keeps {table[-1, 1]:.0%}, but moves by "
        f"only {table[-1, 0]:.3f}. Between them one is bought with the other. It also adds on every step inside, not "
        "only on entering."
    )
    figure = pictures.draw_leak(leaky.RATIOS, table, sample_series())
    return Section("A counter that leaks", text, [("The two weights add up to 1.", figure)])


def _sensitivity(numbers: dict[str, Any]) -> Section:
    left, half = numbers["left_after"], numbers["half_life"]
    text = (
        f"How much does the state depend on the first input, {LATER - 1} steps later? For the tanh cell the "
        f"derivative halves every {half['tanh, shrinking by 0.9']:.1f} steps: {left['tanh, shrinking by 0.9']:.0e} of "
        f"it is left. Behind a shut gate all of it is left ({left['gate shut']:.0%}, to the last bit); a gate that "
        f"lets in 1% each step loses half in {half['gate 1% open']:.0f} steps."
    )
    return Section(
        "What is left of the first input", text, [("Note the logarithmic scale.", pictures.draw_sensitivity(curves()))]
    )


def gate_example() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Noise, three steps at which the gate opens, and the states of a unit with a closed and of one with a leaking gate."""
    values = 2 * torch.randn(60, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    writes = torch.zeros_like(values)
    writes[[5, 25, 45]] = 1
    held = {
        "gate shut between": gating.run_gated_unit(values, writes),
        "gate 5% open between": gating.run_gated_unit(values, writes, 0.05),
    }
    return values, writes, held


def _gates() -> Section:
    values, writes, held = gate_example()
    changes = int((held["gate shut between"].diff() != 0).sum())
    text = (
        "A gate decides whether a unit may be overwritten. Shut, the value stays the same bit for bit whatever comes "
        "in; open, the new value replaces it. Over 60 noisy steps with three openings the gated unit changed "
        f"{changes} times."
    )
    figure = pictures.draw_gate(values, writes, held)
    return Section("A gate", text, [("Dotted: the gate opens.", figure)])


def _grus(numbers: dict[str, Any]) -> Section:
    apart = numbers["gru_difference"]
    text = (
        "The gated unit as the post writes it is h = (1 - z) h' + z c with c = tanh(W x + U (r h')). torch.nn.GRU "
        "differs in two places: its z is the share that is kept, and its r acts after U. With the same weights the "
        f"two drift apart by up to {apart['as_given']:.2f}; with z turned round they still differ by "
        f"{apart['z_turned']:.3f}, because of r."
    )
    return Section("Two gated units", text, [("The first of four units.", pictures.draw_grus(two_grus()))])


def _gated(numbers: dict[str, Any]) -> Section:
    values, long = sample_series(), numbers["long_series"]
    layers = gating.run_counter(values[None])
    text = (
        "With gates the whole counter can be made of such units, five in three layers (2, 1 and 2): the last one's "
        f"gate opens by {gating.STEP:.0%} at an entrance and is shut at all other steps. On a series of "
        f"{long['steps']:,} steps with {long['entrances']} entrances {long['wrong']:.1%} of its counts are wrong. So "
        "few units are enough; the question is whether training finds them."
    )
    figure = pictures.draw_gated_counter(values, layers, gating.read_count(layers)[0])
    return Section("The counter from gated units", text, [("Red is high, blue is low.", figure)])
