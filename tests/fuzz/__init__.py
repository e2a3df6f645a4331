"""Differential fuzzing of the library's public face against float64 computations in which nothing is deleted.

    python -m tests.fuzz --seconds 3600 --seed 7 --workers 2     # all faces, options crossed at random
    python -m tests.fuzz --case '{"face": "operator", ...}'      # repeat one case

A face is a module with `NAME`, `draw(rng) -> case`, `check(case)`, which raises where the library is wrong, and `SIMPLE`, the
simplest value of each option, which is tried when a failing case is shrunk. A case is one JSON object. Error budgets come from
`tests/error_budget.py`.
"""
