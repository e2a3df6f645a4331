"""Contexts begin as the model's own tokenizer begins a text: in training, judging and serving."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from expire_span.cli import main
from expire_span.errors import UserError
from expire_span.hf import RetrofitConfig, load_adapter, retrofit
from expire_span.hf.loading import chat_tokens, read_contexts, turn_tokens
from expire_span.hf.texts import (
    Beginning,
    check_tokenizer,
    check_vocabulary,
    compare_losses,
    cut_contexts,
    describe_beginning,
    encode_text,
    find_beginning,
    join_short,
    template_of_turn,
    text_beginning,
)
from expire_span.lab.caches.questions import make_questions
from expire_span.serve.text import TextModel
from expire_span.settings.retrofit import DistillConfig
from expire_span.train.distiller import Distiller
from tests.hf_models import bos_tokenizer, byte_tokenizer, model_folder, text, tiny, tokens, word_tokenizer

BOS = 1
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"


def with_template(tokenizer):
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_a_text_begins_as_its_tokenizer_begins_it():
    assert text_beginning(byte_tokenizer()) == () and text_beginning(bos_tokenizer()) == (BOS,)
    assert find_beginning(bos_tokenizer()) == Beginning((BOS,), (BOS,))
    plain = byte_tokenizer().encode("a fox")
    assert encode_text(bos_tokenizer(), "a fox") == [BOS, *plain] == encode_text(bos_tokenizer(), "<s>a fox")
    assert encode_text(bos_tokenizer(), "a fox", ()) == plain
    assert encode_text(bos_tokenizer(), "") == [BOS]


def test_a_tokenizer_that_ends_texts_too_only_begins_contexts():
    assert text_beginning(bos_tokenizer(ends=True)) == (BOS,)


def test_a_chat_model_reads_inside_a_users_turn():
    tokenizer = with_template(bos_tokenizer())
    found = find_beginning(tokenizer)
    assert found.text == (BOS,) and tokenizer.decode(list(found.context)) == "[user]"
    turn = template_of_turn(tokenizer)
    assert turn is not None and tokenizer.decode(turn[1]) == "[me]"
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert find_beginning(tokenizer).context == (BOS,)


def test_documents_are_joined_and_cut_behind_the_beginning():
    short = [torch.full((4,), n) for n in (10, 11, 12)]
    long = torch.arange(20, 40)
    joined = join_short([short[0], long, *short[1:]], 8, bos_tokenizer(), (BOS,))
    assert [x.tolist() for x in joined] == [long.tolist(), [10] * 4 + [2, BOS] + [11] * 4, [12] * 4]
    cut = cut_contexts(joined, 8, (BOS,))
    assert [x.tolist() for x in cut[:2]] == [[BOS, *range(20, 27)], [BOS, *range(27, 34)]]
    assert all(len(x) == 8 and int(x[0]) == BOS for x in cut)
    with pytest.raises(UserError, match="a context begins with 9 tokens of its model, got a context of 8; give more"):
        cut_contexts(joined, 8, range(9))


def test_the_loss_shows_whether_a_beginning_helps():
    """The same tokens are scored both times, so a beginning that no layer reads changes nothing."""
    model, documents = tiny(), [tokens(1, 40)[0], tokens(1, 50, seed=5)[0]]
    with_it, without = compare_losses(model, documents, (BOS,))
    assert with_it != without
    assert compare_losses(model, documents, ()) == (without, without)
    rows = torch.cat([torch.full((1, 1), BOS), documents[1][None]], 1)
    wanted = model(rows).logits[0, 1:-1].log_softmax(-1).gather(1, documents[1][1:, None]).mean()
    assert with_it == pytest.approx(-float(wanted), abs=1e-5)
    said = describe_beginning(model, bos_tokenizer(), documents, Beginning((BOS,), (BOS,)))
    assert said.startswith("contexts begin as the model's tokenizer begins one: ") and "with <s> before a text" in said
    assert "as the model's tokenizer begins one: " in describe_beginning(
        model, byte_tokenizer(), documents, Beginning()
    )


def test_a_beginning_is_blamed_by_many_tokens_only(monkeypatch):
    monkeypatch.setattr("expire_span.hf.texts.compare_losses", lambda *_: (4.0, 3.0))
    for count, blamed in ((127, False), (128, True)):
        said = describe_beginning(None, bos_tokenizer(), [tokens(1, count)[0]], Beginning((BOS,), (BOS,)))
        assert ("this beginning hurts" in said) == blamed


def test_contexts_of_training_begin_with_it_and_the_adapter_says_so(tmp_path):
    retrofitted = retrofit(tiny(), RetrofitConfig(max_span=64, ramp=4))
    retrofitted.beginning = Beginning((BOS,), (BOS, 7))
    distiller = Distiller(retrofitted, list(tokens(3, 40)), DistillConfig(budget=0.5, context=32, batch=3))
    assert all(x[:, :2].tolist() == [[BOS, 7]] * 3 and x.shape == (3, 32) for x in [distiller._contexts().ids])
    retrofitted.save(tmp_path)
    retrofitted.detach()
    assert json.loads((tmp_path / "adapter.json").read_text())["begins_with"] == {"text": [1], "context": [1, 7]}
    assert load_adapter(retrofitted.model, tmp_path).beginning == retrofitted.beginning


def test_a_record_that_is_no_record_is_refused(tmp_path):
    for record in ([1], {"text": [1]}, {"text": ["a"], "context": []}, {"text": [-1], "context": []}):
        with pytest.raises(ValueError, match="begins_with"):
            Beginning.from_record(record)
    assert Beginning.from_record(None) is None


def test_serving_follows_the_record():
    retrofitted = retrofit(tiny(), RetrofitConfig(max_span=64, ramp=4))
    plain = byte_tokenizer().encode("a fox")
    assert TextModel.of_retrofit(retrofitted, bos_tokenizer()).encode("a fox") == [BOS, *plain]
    assert TextModel.of_retrofit(retrofitted, byte_tokenizer()).encode("a fox") == plain
    retrofitted.beginning = Beginning((BOS,), (BOS,))
    served = TextModel.of_retrofit(retrofitted, byte_tokenizer())
    assert served.encode("a fox") == [BOS, *plain]
    said = [{"role": "user", "content": "hi"}]
    assert served.chat_tokens is not None and served.turn_tokens is not None
    assert served.chat_tokens(said)[0] == BOS and served.turn_tokens("hi", first=True)[0] == BOS
    assert served.turn_tokens("hi")[0] != BOS
    retrofitted.detach()


def test_a_chat_without_a_template_begins_as_a_text_and_one_with_a_template_as_that_says():
    assert chat_tokens(bos_tokenizer(), [{"role": "user", "content": "hi"}])[0] == BOS
    assert turn_tokens(with_template(bos_tokenizer()), "hi", first=True) == byte_tokenizer().encode("[user]hi[me]")


def test_questions_of_a_chat_model_are_asked_and_answered_in_turns():
    tokenizer = with_template(byte_tokenizer())
    beginning = find_beginning(tokenizer)
    front = torch.tensor(beginning.context)
    document = torch.cat([front, torch.tensor(tokenizer.encode(text(200)))])[:400]
    for one in make_questions(tokenizer, [document], 4, "pairs", begins=beginning):
        assert one.context[: len(front)].equal(front)
        assert "?[me]The " in tokenizer.decode(one.question.tolist())


def test_contexts_without_room_for_a_question_are_refused(tmp_path):
    told = (
        r"has 0 tokens beside its question, too few for facts of \d+ tokens; give a longer --context, or --questions 0"
    )
    with pytest.raises(ValueError, match=told):
        make_questions(byte_tokenizer(), [tokens(1, 40)[0]], 1, "passkey")
    (tmp_path / "a.txt").write_text("A fox.")
    with pytest.raises(
        UserError, match="no document has 48 tokens, the longest has 6; give a shorter --context or more"
    ):
        read_contexts(byte_tokenizer(), tmp_path, 48, Beginning())


def test_the_commands_read_behind_the_beginning(tmp_path, capsys):
    """Contexts began with their text whatever the tokenizer adds, so a model with a BOS token was taught in a regime that
    nobody runs it in."""
    folder = model_folder(tmp_path / "model")
    bos_tokenizer().save_pretrained(folder)
    assert text_beginning(AutoTokenizer.from_pretrained(folder)) == (BOS,)
    (tmp_path / "book.txt").write_text(text(300))
    words = ["--data", str(tmp_path / "book.txt"), "--device", "cpu"]
    small = ["--max-span", "48", "--ramp", "8", "--context", "48", "--block", "48", "--batch", "1", "--steps", "1"]
    small += ["--calibrate", "1", "--tracker", "none", "--budget", "0.5", "--out", str(tmp_path / "run")]
    assert main(["retrofit", str(folder), *words, *small]) == 0
    assert "contexts begin as the model's tokenizer begins one: " in capsys.readouterr().err
    adapter = tmp_path / "run" / "adapter"
    assert json.loads((adapter / "adapter.json").read_text())["begins_with"]["context"] == [BOS]
    asked = ["--adapter", str(adapter), "--methods", "none", "--budgets", "0.5", "--context", "200", "--documents", "1"]
    assert main(["evaluate-cache", str(folder), *words, *asked, "--questions", "0", "--out", str(tmp_path / "t")]) == 0
    assert "contexts begin as" in capsys.readouterr().err


def test_another_models_tokenizer_is_noticed(tmp_path):
    retrofitted = retrofit(tiny(), RetrofitConfig(max_span=64, ramp=4))
    retrofitted.beginning = find_beginning(bos_tokenizer())
    retrofitted.save(tmp_path)
    retrofitted.detach()
    retrofitted = load_adapter(retrofitted.model, tmp_path)
    check_tokenizer(retrofitted, bos_tokenizer())
    with pytest.raises(UserError, match="the tokenizer is another one than the adapter was trained with"):
        TextModel.of_retrofit(retrofitted, word_tokenizer())


@pytest.mark.parametrize(
    "write, words, said",
    [
        ("", [], "no text at"),
        ("A fox.", [], "no document has a context of 48 tokens, the longest has 6"),
        (text(90), ["--context", "4096", "--max-span", "4096"], "made for contexts of 2048 tokens, got --context 4096"),
        (
            text(90),
            ["--budget-bytes", "900"],
            "so 2,432 bytes (8 memories of 304 bytes each) is the least budget, got 900",
        ),
        (text(90), ["--budget-bytes", "90000"], "90,000 bytes is more than the context of 48 tokens of 304 bytes each"),
        (text(90), ["--max-span", "4"], "a head keeps at most 16 memories, got a budget of 24; give a longer max_span"),
        (None, [], "is empty (.txt files: 1); give files with text in them"),
    ],
    ids=["nothing", "tiny", "long", "few bytes", "many bytes", "short spans", "empty"],
)
def test_what_cannot_be_trained_is_one_sentence(tmp_path, capsys, write, words, said):
    folder, data = model_folder(tmp_path / "model"), tmp_path / "data"
    data.mkdir()
    if write != "":
        (data / "a.txt").write_text(write or "")
    base = ["--context", "48", "--ramp", "8", "--max-span", "48", "--batch", "1", "--steps", "1", "--tracker", "none"]
    base += ["--budget", "0.5"] if "--budget-bytes" not in words else []
    more = [*base, *words, "--data", str(data), "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main(["retrofit", str(folder), *more]) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("expire-span: ")]
    assert len(lines) == 1 and said in lines[0], lines


def test_a_tokenizer_with_tokens_that_the_model_lacks():
    with pytest.raises(UserError, match="gives token 97, and LlamaForCausalLM has tokens 0 to 96"):
        check_vocabulary(tiny(), [torch.tensor([3, 97]), torch.tensor([], dtype=torch.long)])
