"""Settings of retrofitted Hugging Face models and of how they learn to forget. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from expire_span.checks import Count, Natural, Positive, Share, checked, require
from expire_span.field_docs import documented
from expire_span.models.systems.expire_span import ExpireSpanConfig, HeadReach
from expire_span.settings.train import Kept


@documented
@dataclass(frozen=True)
@checked
class RetrofitConfig:
    """How memories of a retrofitted model expire."""

    max_span: int = 4096
    """Longest span a memory can be given, in tokens (L). A memory is gone after max_span + ramp tokens at the latest."""
    ramp: int = 128
    """Soft edge of the mask, in tokens (R). Only memories on the ramp give gradients to the span predictors."""
    initial_span: float = 0.999
    """Share of max_span that every memory gets before training: nothing expires in a context of this length."""
    temperature: float = 1.0
    """Divides the predictors' logits w . h; below 1 spans learn faster to differ between tokens."""
    keep_first: int = 0
    """Number of first tokens that are never deleted, whatever their predicted span: pretrained models use the first tokens,
    mostly four, as attention sinks."""
    cap: Count | None = None
    """Hard limit on stored memories per row and head: the one with the fewest steps left is evicted, which is not exact."""
    impl: Literal["auto", "reference", "chunked", "triton"] = "auto"
    """Implementation of the operator; auto takes triton on a GPU and chunked elsewhere."""

    def __post_init__(self) -> None:
        self.lifetimes()  # checks the fields that both have
        require(0 <= self.keep_first <= self.max_span, f"keep_first must lie in [0, max_span], got {self.keep_first}")
        require(
            self.cap is None or self.keep_first < self.cap,
            f"cap must leave room beside the {self.keep_first} first tokens that are kept, got {self.cap}",
        )

    def lifetimes(self) -> ExpireSpanConfig:
        """The same as settings of the memory system: one span per key/value head, with a stop-gradient at the hidden states."""
        return ExpireSpanConfig(
            max_span=self.max_span,
            ramp=self.ramp,
            initial_span=self.initial_span,
            temperature=self.temperature,
            span_per="kv_head",
            span_loss="l1",
            reach=HeadReach(stop_gradient=True),
        )


LESSONS = ("text", "code", "lookups", "repeats", "chat")
"""What a training context can be made of; see train/mixture.py."""
CHAT_MIXTURE = {"text": 0.35, "code": 0.1, "lookups": 0.3, "repeats": 0.15, "chat": 0.1}
"""The mixture `auto` of a model with a chat template; other models learn from text alone."""


def parse_mixture(written: str) -> dict[str, float] | None:
    """The shares of a mixture such as text=0.6,lookups=0.4, which add up to 1; None for auto."""
    if written == "auto":
        return None
    shares: dict[str, float] = {}
    for word in written.split(","):
        name, sign, number = word.strip().partition("=")
        known = f"mixture must be auto or shares such as text=0.6,lookups=0.4 of {', '.join(LESSONS)}, got {written!r}"
        require(name in LESSONS and name not in shares, known)
        try:
            shares[name] = float(number) if sign else 1.0
        except ValueError:
            raise ValueError(known) from None
        require(0 < shares[name] < float("inf"), f"the share of {name} in mixture must be above 0, got {number}")
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()}


@documented
@dataclass(frozen=True)
@checked
class DistillConfig:
    """How the span predictors of a frozen model are trained."""

    budget: float | None = None
    """Living memories at the end of a context, as a fraction of its tokens."""
    budget_tokens: Positive | None = None
    """The same as a number of memories per head."""
    budget_bytes: Count | None = None
    """The same in bytes of keys, values, spans and positions per row, over all layers that learn."""
    more_budgets: str = ""
    """Further budgets as fractions, separated by commas, such as 0.5,0.25: each gets predictors of its own, which are trained
    in turn with the others and lie in the same adapter folder, as its subfolders budget-0.5 and budget-0.25."""
    context: Count = 4096
    """Tokens of a training context; the budget is met at its end."""
    block: Count = 1024
    """Tokens per forward pass: the gradient horizon. The memory is carried from block to block."""
    batch: Count = 4
    """Contexts per optimizer step."""
    mixture: str = "text"
    """What training contexts are made of, as shares such as text=0.6,lookups=0.4: text (--data), code (sources of installed
    Python packages), lookups (facts in many formats, asked for at the end), repeats (passages to be repeated at the end), chat
    (the model's own answers under a system prompt). auto takes all of them if the model has a chat template, else text alone;
    chat only on a GPU."""
    steps: Count = 400
    """Optimizer steps."""
    seconds: Positive | None = None
    """Time limit in seconds since the start or the last resume; the schedule then follows the clock, and steps are skipped."""
    lora_rank: Natural = 0
    """Rank of LoRA weights for the model's linear layers, which are trained too (needs peft); 0 trains the predictors only."""
    lora_lr: Positive = 1e-4
    """Learning rate of the LoRA weights."""
    calibrate: Natural = 0
    """Number of contexts from whose attention in the base model the initial spans are fitted; 0 starts with spans so long that
    nothing expires."""
    anneal: Share = 0.6
    """Share of the steps over which the budget falls from the whole context to its target; calibrated spans begin there."""
    budget_from: Share = 1.0
    """Share of a context after which the budget applies, in proportion to the tokens read; 1 applies it at the end only."""
    lr: Positive | None = None
    """Learning rate of the predictors; None is 0.5 over the model's width, since a predictor sums over the width."""
    bias_lr: Positive = 0.02
    """Learning rate of the predictors' biases, where it is above lr: the mean span of a head is one number."""
    decay: Share = 0.3
    """Share of the steps, at the end, over which the learning rate falls to a twentieth."""
    gain: Positive = 0.1
    """How fast the weight of the span loss follows the budget."""
    initial_weight: Positive = 1e-5
    """Weight of the span loss (mean span in tokens) to start from."""
    clip: Positive = 1.0
    """Largest gradient norm."""
    eval_every: Count = 100
    """Steps between evaluations on held-out text; the last step always has one."""
    eval_contexts: Count = 4
    """Contexts of an evaluation."""
    checkpoint_every: Count = 50
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
        given = {
            n: getattr(self, n) for n in ("budget", "budget_tokens", "budget_bytes") if getattr(self, n) is not None
        }
        require(len(given) == 1, f"give one of budget, budget_tokens and budget_bytes, got {given or 'none'}")
        share = self.budget
        require(
            share is None or 0 < share <= 1,
            f"budget is a share of the context and must lie in (0, 1], got {share}; budget_tokens takes a number of memories",
        )
        parse_mixture(self.mixture)
        for share in self.further:
            require(
                0 < share <= 1 and share != self.budget and self.further.count(share) == 1,
                f"more_budgets must be different shares in (0, 1] beside budget {self.budget}, got {self.more_budgets!r}",
            )

    @property
    def further(self) -> tuple[float, ...]:
        """The further budgets."""
        try:
            return tuple(float(word) for word in self.more_budgets.split(",") if word.strip())
        except ValueError:
            raise ValueError(f"more_budgets must be numbers separated by commas, got {self.more_budgets!r}") from None

    def check_budget(self, ramp: int, keep_first: int, max_span: int | None = None) -> None:
        """Refuse what can be seen to be impossible before the model is known, whose sizes a budget in bytes needs."""
        known = () if self.budget_bytes is not None else (None,)
        for share in (*known, *self.further):
            live = self.target(ramp, 1, keep_first, share)
            most = live if max_span is None else max_span + ramp + keep_first
            require(
                live <= most,
                f"with spans of up to {max_span} tokens, a ramp of {ramp} and {keep_first} first tokens a head keeps at most "
                f"{most} memories, got a budget of {live:g}; give a longer max_span or a smaller budget",
            )
        require(
            ramp < self.context,
            f"a ramp must be shorter than the context, or nothing is ever deleted in training, got ramp {ramp} and context "
            f"{self.context}; give a shorter ramp or a longer context",
        )

    def target(self, ramp: int, bytes_per_token: int, keep_first: int = 0, share: float | None = None) -> float:
        """The budget, or a further one that is given as a share, as living memories per head at the end of a context."""
        share = self.budget if share is None else share
        in_bytes = share is None and self.budget_tokens is None
        if share is not None:
            live = share * self.context
        else:
            live = self.budget_tokens if self.budget_tokens is not None else (self.budget_bytes or 0) / bytes_per_token
        got = f"{self.budget_bytes:,} bytes" if in_bytes else f"{live:g} memories"
        unit = f" of {bytes_per_token:,} bytes each" if in_bytes else ""
        require(
            live <= self.context,
            f"the budget of {got} is more than the context of {self.context} tokens{unit}; give less or a longer context",
        )
        kept = f" and {keep_first} first tokens are kept" if keep_first else ""
        least = ramp + keep_first
        told = f"{least * bytes_per_token:,} bytes ({least} memories{unit})" if in_bytes else f"{least}"
        require(
            live >= least,
            f"every memory lives for its ramp of {ramp} tokens{kept}, so {told} is the least budget, got {got}; give more, or "
            "a shorter ramp",
        )
        return live


@documented
@dataclass(frozen=True)
@checked
class RetrofitTask:
    """Give the base model's answers with less memory."""

    kind: Literal["retrofit"] = "retrofit"
    model: str = ""
    """Folder, .gguf file or hub name of the base model."""
    data: str = ""
    """Text to learn from: a file, or a folder of .txt files."""
    dtype: Literal["fp32", "bf16", "fp16", "int8", "nf4"] = "fp32"
    """Precision of the base model; int8 and nf4 need bitsandbytes. The predictors are always float32."""


@documented
@dataclass(frozen=True)
@checked
class BaseModel:
    """The frozen model and how its memories expire."""

    family: str = ""
    """Its model type, like llama."""
    hash: str = ""
    """Hash that identifies its weights; see hf/adapter.py."""
    dim: Count = 1
    """Width of its hidden states."""
    ff_dim: Count = 1
    """Inner width of its feed-forward part, where it has one number for it."""
    layers: Count = 1
    """Number of attention layers."""
    kv_heads: Count = 1
    """Key/value heads of a layer."""
    head_dim: Count = 64
    """Width of a head."""
    expiry: RetrofitConfig = field(default_factory=RetrofitConfig)
    """How memories expire."""
