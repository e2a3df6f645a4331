"""Expiring memories in torchtitan's trainer: our decoder as its model, with FSDP2, context parallelism and its checkpoints.

    pip install torchtitan==0.3.0
    PYTHONPATH=examples/torchtitan torchrun --nproc_per_node 8 -m torchtitan.train --module expiring --config expiring_300m \
        --dataloader.dataset_path FILE --parallelism.context_parallel_degree 4

torchtitan cuts sequences among the ranks of its context mesh; the memories that outlive a rank's part travel to the others.
Nothing of torchtitan is changed: `--module` names this file, whose functions return configurations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from expire_span import Decoder, DecoderConfig, ExpireSpanConfig
from expire_span.ops.context import ContextGroup, context_parallel


class ExpiringModel(BaseModel):
    """`expire_span.Decoder` behind torchtitan's interface: tokens in, logits out."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        decoder: DecoderConfig
        span_weight: float = 1e-6
        """Weight of the span loss, in nats a memory, query and layer."""

        def update_from_config(self, *, config: Any, **_: Any) -> None:
            """Refuse what this model does not do, before it is built."""
            parallelism = config.parallelism
            for name in ("tensor_parallel_degree", "pipeline_parallel_degree"):
                if getattr(parallelism, name) > 1:
                    raise ValueError(f"{name} must be 1 for this model, got {getattr(parallelism, name)}")
            if parallelism.spmd_backend != "partial_dtensor":
                raise ValueError(f"spmd_backend must be partial_dtensor for this model, got {parallelism.spmd_backend}")
            balancer = parallelism.context_parallel_load_balancer
            if parallelism.context_parallel_degree > 1 and balancer is not None:
                raise ValueError(
                    f"context_parallel_load_balancer must be None, since shards lie in order, got {balancer}; each query "
                    "reads about as many memories as the next, so that there is nothing to balance"
                )
            if config.activation_checkpoint is not None:
                raise ValueError("activation_checkpoint must be None: an exchange of memories cannot be repeated alone")

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Weights, and operations a token in matrix products; attention is left out, since lifetimes are learned."""
            count = sum(p.numel() for p in model.parameters())
            return count, 6 * (count - self.decoder.vocab * self.decoder.dim)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.decoder = Decoder(config.decoder)
        self.context: ContextGroup | None = None
        self.part = 1.0
        """The share of one forward pass in an optimizer step, over all ranks and micro-batches."""

    def verify_module_protocol(self) -> None:
        """The decoder's modules are plain torch modules; `init_states` fills all of them."""

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Weights as `Decoder` draws them, on the CPU of the first rank, then cut as the parameters are."""
        with torch.device("cpu"):
            drawn = Decoder(self.config.decoder)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=torch.distributed.get_world_size() > 1)
        set_model_state_dict(self.decoder, drawn.state_dict(), options=options)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, attention_masks: Any = None) -> Tensor:
        """tokens [B, T], this rank's part of the sequence. The decoder counts positions by itself."""
        with nullcontext() if self.context is None else context_parallel(self.context):
            logits, _, aux = self.decoder(tokens, keep="nothing")
            return _AddLoss.apply(logits, aux.loss * (self.config.span_weight * self.part))  # type: ignore[no-any-return]


class _AddLoss(torch.autograd.Function):
    """Logits unchanged; in the backward pass the loss gets the gradient 1. torchtitan's losses see logits and labels alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Tensor) -> Tensor:
        ctx.like = torch.ones_like(loss)
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, ctx.like


def parallelize(
    model: ExpiringModel, *, parallel_dims: Any, training: TrainingConfig, compile_config: Any, **_: Any
) -> nn.Module:
    """FSDP2 around each block and around the whole; the ranks of the context mesh share each sequence."""
    if parallel_dims.cp_enabled:
        model.context = ContextGroup(parallel_dims.get_mesh("cp"))
    if compile_config.enable and "model" in compile_config.components:
        model.decoder.compile_blocks(carry=False, attention=model.context is None)
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    mesh = parallel_dims.get_mesh(names)
    types = [TORCH_DTYPE_MAP[name] for name in (training.mixed_precision_param, training.mixed_precision_reduce)]
    for block in model.decoder.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(*types))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(*types))
    disable_fsdp_gradient_division(model)  # torchtitan divides by the number of tokens in a step
    if mesh.device_type == "cpu":  # gloo cannot scale while it sums
        for module in (*model.decoder.blocks, model):
            module.set_force_sum_reduction_for_comms(True)
    rows = training.local_batch_size * mesh.size() // parallel_dims.cp
    micro = 1 if training.global_batch_size < 0 else training.global_batch_size // rows
    model.part = 1 / (mesh.size() * micro)
    return model


class ByteTokenizer(BaseTokenizer):
    """Text as bytes."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


class ByteWindows(BaseDataLoader):
    """Windows of one file of bytes, at random places; the place in the random numbers is saved."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int = 0

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        if config.dataset_path is None:
            raise ValueError("--dataloader.dataset_path must name a file, got None")
        self.bytes = torch.frombuffer(bytearray(Path(config.dataset_path).read_bytes()), dtype=torch.uint8)
        if len(self.bytes) <= seq_len:
            raise ValueError(
                f"the file must be longer than a window, got {len(self.bytes)} bytes and seq_len {seq_len}"
            )
        self.size, self.rows = seq_len, local_batch_size
        self.draw = torch.Generator().manual_seed(config.seed * 1_000_003 + dp_rank)
        self.name = f"dp_rank_{dp_rank}"  # a checkpoint keeps one value of each name, whichever rank gives it

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        positions = torch.arange(self.size).expand(self.rows, -1).contiguous()
        while True:
            starts = torch.randint(len(self.bytes) - self.size, (self.rows, 1), generator=self.draw)
            windows = self.bytes[starts + torch.arange(self.size + 1)].long()
            yield {"input": windows[:, :-1].contiguous(), "positions": positions}, windows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {self.name: self.draw.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draw.set_state(state[self.name])


def _config(decoder: DecoderConfig, training: TrainingConfig, **parts: Any) -> Trainer.Config:
    spec = ModelSpec(
        name="expiring",
        flavor=f"{decoder.layers}x{decoder.dim}",
        model=ExpiringModel.Config(decoder=decoder),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    training.disable_cuda_graphs = True  # the lists of living memories have no fixed shapes
    return Trainer.Config(
        model_spec=spec,
        tokenizer=ByteTokenizer.Config(),
        dataloader=ByteWindows.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder.vocab),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=max(2, training.steps // 50)),
        training=training,
        parallelism=ParallelismConfig(context_parallel_load_balancer=None, spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=max(1, training.steps // 20), last_save_model_only=False
        ),
        activation_checkpoint=None,
        **parts,
    )


def expiring_tiny() -> Trainer.Config:
    """A few seconds on two CPU processes."""
    mixer = ExpireSpanConfig(max_span=64, ramp=8, initial_span=0.3)
    decoder = DecoderConfig.modern(vocab=256, dim=32, layers=2, heads=2, ff_dim=64, mixer=mixer)
    return _config(decoder, TrainingConfig(local_batch_size=2, seq_len=64, steps=6))


def expiring_300m() -> Trainer.Config:
    """24 layers of width 1024, windows of 65,536 bytes; not run yet."""
    mixer = ExpireSpanConfig(max_span=16384, ramp=128, initial_span=0.05, span_per="kv_head")
    decoder = DecoderConfig.modern(vocab=256, dim=1024, layers=24, heads=16, ff_dim=4096, mixer=mixer)
    return _config(decoder, TrainingConfig(local_batch_size=1, seq_len=65536, steps=10000))
