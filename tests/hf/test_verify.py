"""A retrofitted model is verified through the stream that users have: exact as it is, and found out where deletion is wrong."""

import pytest

pytest.importorskip("transformers")

from expire_span import Stream
from expire_span.cli import main
from expire_span.hf.decoding import RetrofitModel
from expire_span.hf.loading import open_model
from expire_span.hf.slots import SlotAttention
from expire_span.hf.texts import Beginning
from expire_span.store import ExpiringMemory
from expire_span.stream.verify import verify
from tests.hf_families import forget, tiny_model
from tests.hf_models import bos_tokenizer, forgetful, model_folder, tiny

STEPPED = {
    "llama": lambda: forgetful(tiny(), max_span=40, ramp=4),
    "windows": lambda: forgetful(tiny("gemma3"), max_span=40, ramp=4, keep_first=3),
}
PLAIN = {
    "table of positions": lambda: forgetful(tiny("gpt2"), max_span=40, ramp=4),
    "layers that share keys": lambda: forget(tiny_model("gemma3n_text")),
    "recurrent layers": lambda: forget(tiny_model("qwen3_next")),
    "both in one layer": lambda: forget(tiny_model("falcon_h1")),
}
"""Models that no slots can hold, whose streams take plain steps."""


@pytest.mark.parametrize("case", [*STEPPED, *PLAIN])
def test_every_kind_of_model_is_exact_and_its_memories_are_counted(case):
    retrofitted = (STEPPED | PLAIN)[case]()
    assert Stream(retrofitted, 1).static_shapes == (case in STEPPED)
    found = verify(retrofitted, tokens=130)
    assert found.tokens == 130 and found.difference <= found.allowed and found.evicted == 0
    assert found.born == 130 * sum(layer.kv_heads for layer in retrofitted.layers)
    assert found.born / 2 < found.deleted < found.born


def test_what_is_deleted_too_soon_in_slots_is_found(monkeypatch):
    attend = SlotAttention._attend_plainly

    def forgets_too_soon(self, *args):
        self.memory.slots.span -= 0.5
        return attend(self, *args)

    monkeypatch.setattr(SlotAttention, "_attend_plainly", forgets_too_soon)
    found = verify(STEPPED["llama"](), tokens=130)
    assert found.difference > 100 * found.allowed


@pytest.mark.parametrize("case", PLAIN)
def test_what_is_deleted_too_soon_in_a_store_is_found(case, monkeypatch):
    retrofitted, expire = PLAIN[case](), ExpiringMemory.expire
    monkeypatch.setattr(ExpiringMemory, "expire", lambda self, now: expire(self, now + 3).compact())
    found = verify(retrofitted, tokens=130)
    assert found.difference > 10 * found.allowed


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_evictions_of_a_cap_are_counted(family):
    found = verify(forgetful(tiny(family), max_span=40, ramp=4, cap=6), tokens=130)
    assert 0 < found.evicted <= found.deleted


def test_a_context_begins_as_the_adapter_records(monkeypatch):
    """Its beginning is read at once, as a prompt is, and what follows one by one; of one that is too long, all but a token."""
    retrofitted, read, prompts = forgetful(tiny(), max_span=40, ramp=4, keep_first=3), Stream.read, []
    retrofitted.beginning = Beginning((1,), (1, 5, 6, 7))
    monkeypatch.setattr(Stream, "read", lambda self, rows: (prompts.extend(rows), read(self, rows))[1])
    for count in (60, 3):
        found = verify(retrofitted, tokens=count)
        assert found.tokens == count and found.difference <= found.allowed
    verify(retrofitted, [9, 8, 7, 6, 5, 4])
    assert [prompt.tolist() for prompt in prompts] == [[1, 5, 6, 7], [1, 5], [9, 8, 7, 6]]


def test_a_model_says_how_many_tokens_show_it():
    assert verify(STEPPED["llama"]()).tokens == 512
    short = forgetful(tiny("gpt2"), max_span=40, ramp=4)
    short.length = 50
    assert verify(short).tokens == 50
    with pytest.raises(ValueError, match="needs at least 2 tokens, got 1"):
        verify(short, [3])
    with pytest.raises(ValueError, match=r"tokens must lie in 0\.\.96, the model's vocabulary, got 97"):
        verify(short, [3, 97])


def test_the_command_streams_a_text_behind_its_beginning(tmp_path, capsys, monkeypatch):
    folder = model_folder(tmp_path / "base")
    bos_tokenizer().save_pretrained(folder)
    model, tokenizer = open_model(str(folder), device="cpu")
    retrofitted = forgetful(model, max_span=20, ramp=4)
    retrofitted.beginning = Beginning(tuple(tokenizer.encode("")), tuple(tokenizer.encode("")))
    retrofitted.save(tmp_path / "run" / "adapter")
    (tmp_path / "text.txt").write_bytes("The old fox saw a red hen, é.".encode())
    size = (tmp_path / "text.txt").stat().st_size
    command = ["verify", str(tmp_path / "run" / "adapter"), "--file", str(tmp_path / "text.txt")]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert f"adapter: intact, made for {folder}; {size + 1} tokens streamed" in said and "exact to rounding" in said
    assert main([*command, "--tokens", "9"]) == 0
    assert "; 9 tokens streamed" in capsys.readouterr().out
    monkeypatch.setattr(RetrofitModel, "rounding", 0.0)
    assert main(command) == 1
    assert "NOT exact" in capsys.readouterr().out
    assert main([*command[:3], str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err
