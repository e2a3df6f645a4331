"""Tiny random models of every family that can be retrofitted, and predictors that forget a lot."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from expire_span.hf import Retrofit, RetrofitConfig, retrofit

VOCAB = 97
_SHARED = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
_SHARED |= dict(max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=0)
_GROUPED = _SHARED | dict(num_key_value_heads=2, head_dim=8)
_MIXED = dict(num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
_TABLE = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=2048, bos_token_id=1, eos_token_id=2)
FAMILIES = {
    "llama": lambda: LlamaConfig(**_GROUPED),
    "qwen2": lambda: Qwen2Config(**_GROUPED),
    "qwen3": lambda: Qwen3Config(**_GROUPED),
    "gemma": lambda: GemmaConfig(**_GROUPED),
    "gemma3": lambda: Gemma3TextConfig(**_GROUPED | _MIXED, sliding_window=16),
    "mistral": lambda: MistralConfig(**_GROUPED, sliding_window=24),
    "gpt_neox": lambda: GPTNeoXConfig(**_SHARED),
    "gpt2": lambda: GPT2Config(**_TABLE),
}


def tiny(family: str = "llama", seed: int = 0):
    """A random model whose attention matters: its weights are larger than those of a fresh one."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.dim() == 2 and "embed" not in name and "wte" not in name and "wpe" not in name:
                x.mul_(3)
    return model


def forgetful(
    model, max_span: int = 120, ramp: int = 16, seed: int = 1, own_cache: bool = True, **settings
) -> Retrofit:
    """A retrofit whose spans differ much from token to token and head to head."""
    retrofitted = retrofit(model, RetrofitConfig(max_span=max_span, ramp=ramp, **settings), own_cache=own_cache)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for predictor in retrofitted.predictors.values():
            predictor.weight.copy_(torch.randn(predictor.weight.shape, generator=generator))
            predictor.bias.fill_(-2.0)
    return retrofitted


def tokens(rows: int, count: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))


def byte_tokenizer():
    """A token for each byte, and three special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def bos_tokenizer(ends: bool = False):
    """The same, which puts <s> before every text, as Llama's and Gemma's do; with ends, </s> behind it too."""
    from tokenizers import processors

    tokenizer = byte_tokenizer()
    special = [("<s>", 1), ("</s>", 2)]
    form = "<s> $A </s>" if ends else "<s> $A"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=form, special_tokens=special)
    return tokenizer


def word_tokenizer():
    """A token for each word of a few, marked where it begins, as SentencePiece does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "\u2581a", "\u2581fox", "\u2581named", "."]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], ignore_merges=True))
    marks = pre_tokenizers.Metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([marks, pre_tokenizers.Split(".", "isolated")])
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def model_folder(path, family: str = "llama"):
    """A tiny model that reads bytes, saved with its tokenizer."""
    config = FAMILIES[family]()
    config.vocab_size = 259
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def text(words: int = 2000, seed: int = 0) -> str:
    """Sentences of a small world."""
    import random

    rng = random.Random(seed)
    parts = ["the old fox", "a red hen", "my friend", "the river", "saw", "took", "left", "a stone", "the road", "home"]
    return " ".join(rng.choice(parts) + rng.choice(["", "", ".", ","]) for _ in range(words))


@torch.no_grad()
def read(retrofitted, ids):
    """A new cache that has read the tokens ids [B, T], and the logits after the last of them."""
    cache = retrofitted.new_cache()
    return cache, retrofitted.model(ids, past_key_values=cache, use_cache=True).logits[:, -1]


def q4_1(x):
    """The bytes of a tensor in GGUF's format Q4_1: blocks of 32 numbers with a scale, a least value, and four bits a number."""
    blocks = x.detach().reshape(-1, 32)
    low = blocks.amin(1, keepdim=True)
    scale = (blocks.amax(1, keepdim=True) - low) / 15
    found = ((blocks - low) / scale).round().clamp(0, 15).to(torch.uint8)
    numbers = torch.cat([scale, low], 1).half().view(torch.uint8)
    return torch.cat([numbers, found[:, :16] | found[:, 16:] << 4], 1).numpy().tobytes()


def write_gguf(path, tensors, fields=(), rounded=False):
    """A GGUF file of float32 tensors and fields (whole numbers, numbers, texts, and lists of numbers or texts).
    rounded: matrices whose rows divide into blocks are in Q4_1."""
    import struct

    def text(word):
        return struct.pack("<Q", len(word.encode())) + word.encode()

    def value(x):
        if isinstance(x, str):
            return struct.pack("<I", 8) + text(x)
        if isinstance(x, list):
            texts = isinstance(x[0], str)
            items = map(text, x) if texts else (struct.pack("<f", number) for number in x)
            return struct.pack("<IIQ", 9, 8 if texts else 6, len(x)) + b"".join(items)
        return struct.pack("<If", 6, x) if isinstance(x, float) else struct.pack("<IQ", 10, x)

    fields = {"general.architecture": "llama", "general.name": "x", **dict(fields)}
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields))
    head += b"".join(text(name) + value(x) for name, x in fields.items())
    data = b""
    for name, x in tensors.items():
        few = rounded and x.dim() == 2 and x.shape[1] % 32 == 0
        head += text(name) + struct.pack(f"<I{x.dim()}QIQ", x.dim(), *reversed(x.shape), 3 * few, len(data))
        data += q4_1(x) if few else x.detach().numpy().tobytes()
        data += bytes(-len(data) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def llama_gguf(path, drop=(), more=(), rounded=False, **fields):
    """A GGUF file of the tiny llama that reads bytes, without some of its tensors, with more, and with other fields."""
    config = FAMILIES["llama"]()
    config.vocab_size = 259
    torch.manual_seed(0)
    parts = {
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
        "attn_o.": "attn_output.",
        "input_layernorm": "attn_norm",
    }
    parts |= {"post_attention_layernorm": "ffn_norm", "model.layers": "blk", "model.embed_tokens": "token_embd"}
    parts |= {"model.norm": "output_norm", "lm_head": "output"}
    tensors = dict(more)
    for name, x in AutoModelForCausalLM.from_config(config).state_dict().items():
        for theirs, ours in parts.items():
            name = name.replace(theirs, ours)
        tensors[name] = x
    words = [word for word, _ in sorted(byte_tokenizer().get_vocab().items(), key=lambda x: x[1])]
    words[-2:] = ["abc", "ab"]  # a merge must make a word that is known; transformers 5.17 cannot read a single one
    about = {"block_count": 2, "context_length": 2048, "embedding_length": 32, "feed_forward_length": 48}
    about |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6}
    about |= {"rope.dimension_count": 8, "rope.freq_base": 1e4, "vocab_size": 259, **fields}
    told = {f"llama.{name}": x for name, x in about.items()} | {"tokenizer.ggml.model": "gpt2"}
    told |= {"tokenizer.ggml.tokens": words, "tokenizer.ggml.merges": ["a b", "ab c"], "tokenizer.ggml.eos_token_id": 2}
    told |= {"tokenizer.ggml.scores": [0.0] * len(words)}
    told |= {"tokenizer.ggml.bos_token_id": 2}  # transformers 5.17 looks the end up by it
    return write_gguf(path, {name: x for name, x in tensors.items() if name not in drop}, told, rounded)
