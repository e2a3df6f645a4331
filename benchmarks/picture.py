"""The README's picture: the lifelines of one episode, drawn from a trained run.

python -m benchmarks.picture RUN [--out docs/img/lifelines.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib import rc_context

from expire_span.checkpoint import load_model
from expire_span.runs import RunFolder
from expire_span.tasks.registry import build_task
from expire_span.view.pictures import STYLE, draw_lifelines
from expire_span.view.sample import marks_of, read_sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a trained recall run")
    parser.add_argument("--out", type=Path, default=Path("docs/img/lifelines.png"))
    args = parser.parse_args()
    decoder, config = load_model(RunFolder.open(args.run))
    sample = read_sample(decoder, build_task(config.task), config.seed)
    figure = draw_lifelines(
        sample.lifetimes(sample.longest_layer),
        kinds=sample.kinds,
        marks=marks_of(sample),
        title="Each bar is one memory, from birth to deletion: the cue is kept until it is asked for, the corridor is not",
        unit="step of the episode",
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        figure.savefig(args.out, bbox_inches="tight", facecolor="white", dpi=110)
    print(f"{args.out}, {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
