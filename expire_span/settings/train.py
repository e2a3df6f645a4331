"""Settings of training. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from expire_span.checks import check_fields, require
from expire_span.field_docs import documented


@documented
@dataclass(frozen=True)
class BudgetConfig:
    """Hold the mean number of live memories to a target, by adjusting the weight of the span loss automatically."""

    live: float | None = None
    """Target: mean live memories per query, averaged over layers. None leaves the loss weight fixed."""
    bytes: int | None = None
    """The same target in bytes of key/value cache per row, over all layers; give live or bytes, not both."""
    initial_weight: float = 1e-6
    """Loss weight the controller starts from."""
    gain: float = 0.05
    """How fast the weight follows: at twice the target it grows by about this fraction times 0.7 each step."""
    max_weight: float = 1e-1
    """Upper limit of the weight."""
    start_loss: float | None = None
    """Wait with any span loss until the task loss (a running mean, nats) has once fallen below this; None starts at once."""
    wait: int = 0
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
        for name in ("live", "bytes"):
            value = getattr(self, name)
            require(value is None or value > 0, f"budget {name} must be greater than 0, got {value}")
        require(self.initial_weight > 0, f"initial_weight must be greater than 0, got {self.initial_weight}")
        require(self.wait >= 0, f"wait must be 0 or more, got {self.wait}")
        require(self.gain > 0, f"gain must be greater than 0, got {self.gain}")
        require(self.max_weight > 0, f"max_weight must be greater than 0, got {self.max_weight}")

    @property
    def active(self) -> bool:
        return self.live is not None or self.bytes is not None


@documented
@dataclass(frozen=True)
class LearningConfig:
    """Settings of every kind of training: its length, optimizer, learning rates, span loss, and what it writes."""

    steps: int = 1000
    """Optimizer steps."""
    seconds: float | None = None
    """Time limit in seconds since the start or the last resume, evaluations included. If the clock is ahead of the steps,
    schedules follow the clock, so that such a run cannot be repeated bit for bit. None: no limit."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for all weights, or Muon for the blocks' matrices and AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    muon_lr: float = 2e-2
    """Peak learning rate of Muon."""
    span_lr_scale: float = 1.0
    """The span predictors learn at lr times this."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Adam's running-mean factors."""
    clip: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    warmup: int = 50
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "constant", "linear"] = "cosine"
    """Learning rate after the warm-up: down to final_lr along a cosine or a line, or constant."""
    decay_share: float = 1.0
    """With schedule=linear: the fraction of the steps, at the end, over which the rate falls."""
    final_lr: float = 0.1
    """Share of the peak learning rate left at the last step."""
    span_weight: float = 1e-6
    """Fixed weight of the span loss (alpha), used when no budget is set."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """Budget controller; replaces span_weight when its target is set."""
    eval_every: int = 200
    """Steps between evaluations; the last step always has one."""
    checkpoint_every: int = 200
    """Steps between checkpoints; the last step always has one."""
    keep_checkpoints: int = 2
    """How many checkpoints stay on disk."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    tracker: Literal["tensorboard", "wandb", "mlflow", "none"] = "tensorboard"
    """Viewer that the metrics also go to: TensorBoard files in the run folder, Weights & Biases, MLflow, or none."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        check_fields(self, finite=False)  # a run refuses infinities and NaN, and says in which part they are
        for name in ("steps", "eval_every", "checkpoint_every", "log_every"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        limited = self.seconds is None or 0 < self.seconds < math.inf
        require(limited, f"seconds must be greater than 0 and finite, got {self.seconds}")
        require(self.keep_checkpoints >= 2, f"keep_checkpoints must be at least 2, got {self.keep_checkpoints}")
        for name in ("lr", "muon_lr", "span_lr_scale"):
            require(getattr(self, name) > 0, f"{name} must be greater than 0, got {getattr(self, name)}")
        for name in ("warmup", "clip", "weight_decay", "span_weight"):
            require(getattr(self, name) >= 0, f"{name} must be 0 or more, got {getattr(self, name)}")
        require(0 <= self.final_lr <= 1, f"final_lr must lie in [0, 1], a share of the peak, got {self.final_lr}")
        for beta in self.betas:
            require(0 <= beta < 1, f"betas must lie in [0, 1), got {self.betas}")
        require(0 < self.decay_share <= 1, f"decay_share must lie in (0, 1], got {self.decay_share}")


@documented
@dataclass(frozen=True)
class TrainConfig(LearningConfig):
    """How the weights are learned."""

    batch: int = 16
    """Rows per optimizer step, over all processes and accumulation steps together."""
    block: int = 256
    """Tokens per row and step: the gradient horizon. Long blocks are parallel training, short ones carry memory."""
    carry: bool = True
    """Carry each row's memory from block to block (text); off, every block starts empty."""
    accumulate: int = 1
    """Micro-batches per optimizer step; must divide batch."""
    context_parallel: int = 1
    """Number of processes that share each row: every one reads a contiguous shard of the block and sends the others only the
    memories that they can still see. Must divide the block and the number of processes."""
    pieces: int = 1
    """Read each block in this many pieces, one after another, with the gradients of the whole block: only the activations of
    one piece and the memories that outlive theirs are held, and every piece but the last is computed twice."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward and backward pass; with bf16, a GPU computes products that stay in float32 as TF32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    graphs: bool = True
    """On one GPU, record training steps as CUDA graphs and replay them, if all layers allow it: the shapes of their states must
    stay the same, and the host must not wait for the device."""
    averaging: float = 0.0
    """Evaluate, and keep for use, an exponential moving average of the weights with this decay, such as 0.999; training goes on
    from the newest weights. 0 evaluates the newest."""
    decay_dip: float = 0.0
    """Lower the weight decay in the middle of training, to 1 - decay_dip of itself, along a cosine; at both ends it is
    weight_decay."""
    eval_batches: int = 8
    """Batches per evaluation during training."""
    test_batches: int | None = None
    """Number of batches of the final evaluation on the test split; None reads all of it, for which the states of systems that
    never forget may be too large."""
    eval_batch: int | None = None
    """Number of rows in evaluations; None takes batch."""
    eval_block: int | None = None
    """Tokens per row and forward pass in evaluations; None takes block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch", "block", "accumulate", "eval_batches", "context_parallel", "pieces"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("test_batches", "eval_batch", "eval_block"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, got {value}")
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
        for name in ("averaging", "decay_dip"):
            require(0 <= getattr(self, name) < 1, f"{name} must lie in [0, 1), got {getattr(self, name)}")
        whole = "pieces need blocks that begin without memory, got carry True; give --train.carry False"
        require(self.pieces == 1 or not self.carry, whole)
