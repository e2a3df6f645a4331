"""Sections on what was trained: the exercise, longer series, and decoders on the same series."""

from __future__ import annotations

from typing import Any

import numpy as np

from expire_span.lab.study import charts
from expire_span.lab.study.page import Section


def learned(result: dict[str, Any]) -> list[Section]:
    return [_exercise(result), _longer(result), _decoders(result), _spans(result)]


def _exercise(result: dict[str, Any]) -> Section:
    cells, trained = result["exercise"], result["trained_length"]
    size = cells[0]["size"]
    text = (
        f"Gated networks of different depth and width, {size['seeds']} seeds each, learned the running count on fresh "
        f"series of {trained} steps, {size['steps']} updates of {size['batch']} series. Solved means that the last "
        f"count is right on {result['solved_means']:.0%} of 512 unseen series. {describe_sizes(cells)}"
    )
    pictures = [
        (
            "Error: share of the unseen series whose last count is wrong, median over seeds.",
            charts.draw_table(cells, trained),
        ),
        ("Median over seeds.", charts.draw_learning(cells)),
    ]
    return Section("Learning to count from random weights", text, pictures, size_table(cells, trained))


def describe_sizes(cells: list[dict[str, Any]]) -> str:
    """A sentence on which sizes solve the task."""
    shares = {(cell["size"]["layers"], cell["size"]["units"]): cell["solved"] for cell in cells}
    always = [f"{layers} x {units}" for (layers, units), share in shares.items() if share == 1]
    never = [f"{layers} x {units}" for (layers, units), share in shares.items() if share == 0]
    return (
        f"Every seed solved it with (layers x units) {', '.join(always) or 'none of the sizes'}; none did with "
        f"{', '.join(never) or 'none of the sizes'}. Five units are enough in principle."
    )


def size_table(cells: list[dict[str, Any]], trained: int) -> list[list[str]]:
    rows = [["layers", "units", "weights", "solved", "median error", "worst error", "median steps to solve", "seconds"]]
    for cell in cells:
        took = [steps for steps in cell["steps_to_solve"] if steps is not None]
        errors = cell["lengths"][str(trained)]["last"]
        row = [str(cell["size"]["layers"]), str(cell["size"]["units"]), str(cell["weights"]), f"{cell['solved']:.0%}"]
        row += [f"{np.median(errors):.1%}", f"{max(errors):.1%}", f"{np.median(took):.0f}" if took else "never"]
        rows.append([*row, f"{cell['seconds']:.0f}"])
    return rows


def best_cell(cells: list[dict[str, Any]], trained: int) -> dict[str, Any]:
    """The size with the least error on twice the length it was trained on."""
    return min(cells, key=lambda cell: np.median(cell["lengths"][str(2 * trained)]["seen_counts"]))


def systems_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The systems in the picture of longer series: the hand-made counter, the best network, and the decoders (all seeds)."""
    best = best_cell(result["exercise"], result["trained_length"])
    size = f"{best['size']['layers']} x {best['size']['units']}"
    systems = {"5 units by hand": result["by_hand"]["gated_counter"], f"gated network {size}": best}
    for mixer in dict.fromkeys(model["mixer"] for model in result["decoders"]):
        systems[f"{mixer} decoder"] = join_seeds([m for m in result["decoders"] if m["mixer"] == mixer])
    return systems


def join_seeds(models: list[dict[str, Any]]) -> dict[str, Any]:
    lengths = {
        length: {key: [m["lengths"][length][key][0] for m in models] for key in ("last", "all", "seen_counts")}
        for length in models[0]["lengths"]
    }
    return {"lengths": lengths}


def _longer(result: dict[str, Any]) -> Section:
    systems, trained = systems_of(result), result["trained_length"]
    (_, by_hand), (name, best), *_ = systems.items()
    far = str(4 * trained)
    text = (
        "The same models on series that are longer than any they were trained on. By hand: "
        f"{by_hand['lengths'][far]['last'][0]:.1%} wrong at {far} steps. The {name} that keeps best: "
        f"{np.median(best['lengths'][far]['last']):.0%} wrong last counts, but "
        f"{np.median(best['lengths'][far]['seen_counts']):.0%} among the steps whose count (up to "
        f"{best['largest_seen']}) training had shown: a bounded state with a linear read-out runs out of room for "
        "larger counts sooner than it forgets."
    )
    rows = [["system", *(f"{length} steps: last, seen counts" for length in best["lengths"])]]
    for system, found in systems.items():
        parts = found["lengths"].values()
        rows.append([system, *(f"{np.median(p['last']):.1%}, {np.median(p['seen_counts']):.1%}" for p in parts)])
    return Section("Longer series", text, [("Median over seeds.", charts.draw_lengths(systems))], rows)


def _decoders(result: dict[str, Any]) -> Section:
    rows = [["decoder", "seed", "weights", "counts right", "memories alive per layer", "of those seen", "seconds"]]
    for model in result["decoders"]:
        live = ", ".join(f"{x:.1f}" for x in model["live"])
        row = [model["mixer"], str(model["seed"]), f"{model['weights']:,}", f"{model['score']:.1%}", live]
        rows.append([*row, f"{model['live_share']:.0%}", f"{model['seconds']:.0f}"])
    text = (
        "The same series, read as levels by the project's decoder and trained by its ordinary training. A recurrent "
        "state has one number to add to. Expire-Span has none: it must keep events and attend to them, so what it holds "
        "grows with the count."
    )
    return Section("Expire-Span on the same series", text, table=rows)


def _spans(result: dict[str, Any]) -> Section:
    rows: list[list[str]] = []
    for model in result["decoders"]:
        for n, layer in enumerate(model["spans"]):
            rows = rows or [["seed", "layer", *layer]]
            rows.append([str(model["seed"]), str(n + 1), *(f"{span:.1f}" for span in layer.values())])
    text = (
        "The mean span, in steps, that each kind of step is given. Every run of steps inside begins with an entrance and "
        "ends with an exit, so a model may keep either. Early ones are those in the first half of the series. A span needs "
        "to last only until the series ends: where early events get longer spans than late ones, the model has learned how "
        "much time is left, and longer series than those of training then find memories already gone."
    )
    return Section("What Expire-Span keeps", text, table=rows)
