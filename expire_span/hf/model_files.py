"""What is in a model folder or a GGUF file, read before transformers opens it.

Damaged files are refused by name here, and so are settings that do not fit the weights: transformers would build a model of
whatever size config.json asks for, and fill what the weights lack with random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from expire_span.checks import as_whole, show
from expire_span.disk.files import check_plain, read_json
from expire_span.errors import UserError, describe

Shapes = dict[str, tuple[int, ...]]
"""Shapes of weights by their names in the file."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TABLES = ("generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json")
TABLES += ("added_tokens.json", "vocab.json")
"""Files that hold a JSON table of fields, where they are there; transformers does not tell which of them it cannot read."""
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
LAYERS = ("num_hidden_layers", "n_layer", "block_count")
WIDTHS = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
WIDTHS += ("n_embd", "n_head", "n_inner", "n_positions", "num_labels")
WIDTHS += ("embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv")
WIDTHS += ("attention.key_length", "attention.value_length", "max_position_embeddings", "context_length")
WIDTHS += ("sliding_window", "sliding_window_pattern")
ANY_LENGTH = ("max_position_embeddings", "context_length", "sliding_window", "sliding_window_pattern")
"""Sizes of which no weight has a dimension where positions are rotary."""
SPARE = 2
"""How many times more numbers than its file a model may hold: an output layer that shares the embedding's numbers, say."""


def check_tables(path: Path) -> dict[str, Any]:
    """The config of a folder with weights in safetensors, after its files of JSON have been read."""
    _check_kinds(path)
    for name in TABLES:
        if (path / name).exists() or (path / name).is_symlink():
            read_json(path / name)
    config = read_json(path / "config.json")
    named = config.get("transformers_weights")
    if named is not None:
        raise UserError(f"{path / 'config.json'} names its weights ({show(named)}); give a folder with a {WEIGHTS}")
    check_numbers(config, path / "config.json")
    return config


def check_weights(path: Path, config: dict[str, Any]) -> Shapes:
    """The shapes of a folder's weights, with which its config's sizes are compared."""
    shapes = _read_shapes(path)
    check_sizes(config, shapes, path / "config.json")
    return shapes


def _check_kinds(path: Path) -> None:
    """Refuse a folder without whole weights in safetensors."""
    if (path / "adapter_config.json").exists():
        raise UserError(
            f"{path} has an adapter_config.json: merge that adapter into its model and save the model whole"
        )
    if (path / WEIGHTS).exists() or (path / WEIGHTS).is_symlink() or (path / INDEX).exists():
        return
    pickled = sorted(x.name for pattern in PICKLED for x in path.glob(pattern))
    if pickled:
        raise UserError(
            f"{path} has pickled weights only ({pickled[0]}), which can run code when loaded; if you trust them, open the "
            "model with transformers and save it again with save_pretrained, which writes safetensors"
        )
    raise UserError(f"{path} has no {WEIGHTS} and no {INDEX}")


def _read_shapes(path: Path) -> Shapes:
    if (path / WEIGHTS).exists() or (path / WEIGHTS).is_symlink():
        return _shapes_in(path / WEIGHTS)
    files = [path / file for file in check_index(path / INDEX)]
    lost = next((file.name for file in files if not file.exists()), None)
    if lost is not None:
        raise UserError(f"{path / INDEX} names {lost}, and there is no such file beside it; copy the folder again")
    return {name: shape for file in files for name, shape in _shapes_in(file).items()}


def check_index(path: Path) -> list[str]:
    """The files that an index of weights names; refused unless they are safetensors files beside it."""
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise UserError(f"{path} must have a table weight_map of weights and their files, got {show(names)}")
    for weight, file in names.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise UserError(
                f"{path} must name safetensors files beside it, got {show(file)} for {weight}; other files can run code "
                "when loaded"
            )
    return sorted(set(names.values()))


def _shapes_in(path: Path) -> Shapes:
    try:
        check_plain(path)
        with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except OSError as error:
        raise UserError(f"cannot read {path}: {describe(error)}") from error
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path} is not a safetensors file that can be read ({error}); copy it again") from error


def check_numbers(config: dict[str, Any], path: Path) -> None:
    """Refuse sizes that are no sizes."""
    for name, value in _sizes_in(config):
        if (whole := as_whole(value)) is None or whole < 1:
            raise UserError(f"{path}: {name} must be a whole number of at least 1, got {show(value)}")


def check_sizes(config: dict[str, Any], shapes: Shapes, path: Path) -> None:
    """Refuse sizes that are no sizes, and sizes of a model that is larger than these weights."""
    check_numbers(config, path)
    total = sum(map(math.prod, shapes.values()))
    for name, value in _sizes_in(config):
        end = name.split(".")[-1]
        most = 2**31 if name.endswith(ANY_LENGTH) else len(shapes) if end in LAYERS else SPARE * total
        if value > most:
            raise UserError(
                f"{path}: {name} is {show(value)}, which is more than {most:,}, the most that fits weights of {len(shapes):,} "
                f"tensors with {total:,} numbers; give the config and the weights of one model"
            )


def _sizes_in(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The sizes that a config sets, with their names; also in tables inside it, as of a model of text and images."""
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, dict):
            yield from _sizes_in(value, f"{prefix}{name}.")
        elif name in LAYERS + WIDTHS and value is not None:
            yield prefix + name, value


def check_model_size(config: Any, shapes: Shapes, told: str) -> None:
    """Refuse a config whose model has far more numbers than the weights: one without sizes takes the defaults of its kind."""
    import torch
    from transformers import AutoModelForCausalLM

    if (layers := config.get_text_config().num_hidden_layers) > len(shapes):
        raise UserError(f"{told} describes {layers:,} layers, and the weights have {len(shapes):,} tensors in all")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    need, have = sum(p.numel() for p in model.parameters()), sum(map(math.prod, shapes.values()))
    if need > SPARE * have:
        raise UserError(
            f"{told} describes a model of {need:,} numbers, and the weights hold {have:,}; give the config and the weights of "
            "one model"
        )
