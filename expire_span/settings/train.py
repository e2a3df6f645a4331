"""Settings of training. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from expire_span.checks import (
    Bound,
    Count,
    Duration,
    Natural,
    NonNegative,
    Positive,
    Share,
    ShareAboveZero,
    ShareBelowOne,
    at_least,
    check_fields,
    require,
)
from expire_span.field_docs import documented

Kept = Annotated[int, at_least(2)]
"""Number of checkpoints on disk: the newest may be damaged, so that another must be there."""


@documented
@dataclass(frozen=True)
class BudgetConfig:
    """Hold the mean number of live memories to a target, by adjusting the weight of the span loss automatically."""

    live: Positive | None = None
    """Target: mean live memories per query, averaged over layers. None leaves the loss weight fixed."""
    bytes: Annotated[int, Bound("be greater than 0", lambda x: x > 0)] | None = None
    """The same target in bytes of key/value cache per row, over all layers; give live or bytes, not both."""
    initial_weight: Positive = 1e-6
    """Loss weight the controller starts from."""
    gain: Positive = 0.05
    """How fast the weight follows: at twice the target it grows by about this fraction times 0.7 each step."""
    max_weight: Positive = 1e-1
    """Upper limit of the weight."""
    start_loss: float | None = None
    """Wait with any span loss until the task loss (a running mean, nats) has once fallen below this; None starts at once."""
    wait: Natural = 0
    """Number of steps without any span loss: spans shrink to what was needed so far, which early on may be too little."""
    patience_loss: float | None = None
    """Reduce the weight while the running task loss is above this, so that the span loss does not undo the task; None:
    never."""
    rest: bool = False
    """Switch the span loss off while the target is met or patience_loss is exceeded. Adam's steps are hardly shorter under a
    small weight, so that spans which no task loss holds up would go on falling."""

    def __post_init__(self) -> None:
        check_fields(self, finite=False)  # a run refuses infinities and NaN, and says in which part they are
        require(self.live is None or self.bytes is None, f"give budget live or bytes, got {self.live} and {self.bytes}")

    @property
    def active(self) -> bool:
        return self.live is not None or self.bytes is not None


@documented
@dataclass(frozen=True)
class LearningConfig:
    """Settings of every kind of training: its length, optimizer, learning rates, span loss, and what it writes."""

    steps: Count = 1000
    """Optimizer steps."""
    seconds: Duration | None = None
    """Time limit in seconds since the start or the last resume, evaluations included. If the clock is ahead of the steps,
    schedules follow the clock, so that such a run cannot be repeated bit for bit. None: no limit."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for all weights, or Muon for the blocks' matrices and AdamW for the rest."""
    lr: Positive = 1e-3
    """Peak learning rate of AdamW."""
    muon_lr: Positive = 2e-2
    """Peak learning rate of Muon."""
    span_lr_scale: Positive = 1.0
    """The span predictors learn at lr times this."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of matrices."""
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.99)
    """Adam's running-mean factors."""
    clip: NonNegative = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    warmup: Natural = 50
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "constant", "linear"] = "cosine"
    """Learning rate after the warm-up: down to final_lr along a cosine or a line, or constant."""
    decay_share: ShareAboveZero = 1.0
    """With schedule=linear: the fraction of the steps, at the end, over which the rate falls."""
    final_lr: Share = 0.1
    """Share of the peak learning rate left at the last step."""
    span_weight: NonNegative = 1e-6
    """Fixed weight of the span loss (alpha), used when no budget is set."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """Budget controller; replaces span_weight when its target is set."""
    eval_every: Count = 200
    """Steps between evaluations; the last step always has one."""
    checkpoint_every: Count = 200
    """Steps between checkpoints; the last step always has one."""
    keep_checkpoints: Kept = 2
    """How many checkpoints stay on disk."""
    log_every: Count = 10
    """Steps between lines of metrics.jsonl."""
    tracker: Literal["tensorboard", "wandb", "mlflow", "none"] = "tensorboard"
    """Viewer that the metrics also go to: TensorBoard files in the run folder, Weights & Biases, MLflow, or none."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        check_fields(self, finite=False)  # a run refuses infinities and NaN, and says in which part they are


@documented
@dataclass(frozen=True)
class TrainConfig(LearningConfig):
    """How the weights are learned."""

    batch: Count = 16
    """Rows per optimizer step, over all processes and accumulation steps together."""
    block: Count = 256
    """Tokens per row and step: the gradient horizon. Long blocks are parallel training, short ones carry memory."""
    carry: bool = True
    """Carry each row's memory from block to block (text); off, every block starts empty."""
    accumulate: Count = 1
    """Micro-batches per optimizer step; must divide batch."""
    context_parallel: Count = 1
    """Number of processes that share each row: every one reads a contiguous shard of the block and sends the others only the
    memories that they can still see. Must divide the block and the number of processes."""
    pieces: Count = 1
    """Read each block in this many pieces, one after another, with the gradients of the whole block: only the activations of
    one piece and the memories that outlive theirs are held, and every piece but the last is computed twice."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward and backward pass; with bf16, a GPU computes products that stay in float32 as TF32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    graphs: bool = True
    """On one GPU, record training steps as CUDA graphs and replay them, if all layers allow it: the shapes of their states must
    stay the same, and the host must not wait for the device."""
    averaging: ShareBelowOne = 0.0
    """Evaluate, and keep for use, an exponential moving average of the weights with this decay, such as 0.999; training goes on
    from the newest weights. 0 evaluates the newest."""
    decay_dip: ShareBelowOne = 0.0
    """Lower the weight decay in the middle of training, to 1 - decay_dip of itself, along a cosine; at both ends it is
    weight_decay."""
    eval_batches: Count = 8
    """Batches per evaluation during training."""
    test_batches: Count | None = None
    """Number of batches of the final evaluation on the test split; None reads all of it, for which the states of systems that
    never forget may be too large."""
    eval_batch: Count | None = None
    """Number of rows in evaluations; None takes batch."""
    eval_block: Count | None = None
    """Tokens per row and forward pass in evaluations; None takes block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.batch % self.accumulate == 0,
            f"accumulate must divide batch, got accumulate {self.accumulate} and batch {self.batch}",
        )
        for name in ("context_parallel", "pieces"):
            parts = getattr(self, name)
            require(self.block % parts == 0, f"{name} must divide block, got {name} {parts} and block {self.block}")
        both = f"got context_parallel {self.context_parallel} and pieces {self.pieces}"
        require(
            self.context_parallel == 1 or self.pieces == 1,
            f"a block is shared or read in pieces, {both}; leave one at 1",
        )
        whole = "pieces need blocks that begin without memory, got carry True; give --train.carry False"
        require(self.pieces == 1 or not self.carry, whole)
