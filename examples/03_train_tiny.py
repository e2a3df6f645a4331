"""Train a tiny model from Python: recall a colour through a short corridor, then forget the corridor.

python examples/03_train_tiny.py [folder for the run]
"""

import sys
import tempfile
from pathlib import Path

from expire_span.settings.run import BudgetConfig, DecoderConfig, ExpireSpanConfig, RecallTask, RunConfig, TrainConfig
from expire_span.train.supervised import train
from expire_span.view.report import write_report

task = RecallTask(min_length=10, max_length=40)
mixer = ExpireSpanConfig(max_span=256, ramp=4, initial_span=0.999, span_loss="l1")
model = DecoderConfig.modern(dim=64, layers=1, heads=2, ff_dim=64, positions="none", mixer=mixer)
training = TrainConfig(
    steps=160,
    batch=32,
    block=42,  # holds the longest episode: each row is one episode
    carry=False,
    lr=1e-2,
    warmup=10,
    schedule="constant",
    # First learn the task; once its loss is below 0.5, the span loss shortens spans until about 7 memories are alive.
    budget=BudgetConfig(live=7, initial_weight=1e-3, max_weight=1e-2, start_loss=0.5, patience_loss=0.5),
    eval_every=80,
)
folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()) / "tiny"
run = train(RunConfig(task, model, training), folder, shown=False)

result = run.read_result()
assert result is not None
print(f"success {result['score']:.1%} on fresh episodes, where guessing gives 25%")
print(f"memories alive: {result['live'][0]:.1f} on average, {result['live_share']:.0%} of those seen")
print(f"report: {write_report(run)}")
