"""Distillation meets its budget, goes on where it stopped, and the commands around it work end to end."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from expire_span.cli import main  # noqa: E402
from expire_span.cli.retrofit import tell_next  # noqa: E402
from expire_span.hf import RetrofitConfig, calibration, load_adapter, retrofit  # noqa: E402
from expire_span.runs import RunFolder  # noqa: E402
from expire_span.settings.retrofit import DistillConfig  # noqa: E402
from expire_span.train.distill import DistillLearner, distill, distill_on  # noqa: E402
from expire_span.train.distiller import Distiller, kl_divergence  # noqa: E402
from expire_span.train.mixture import Contexts  # noqa: E402
from tests.error_budget import DOUBLE, reordered  # noqa: E402
from tests.hf_models import byte_tokenizer, forgetful, model_folder, text, tiny, tokens  # noqa: E402
from tests.tiny import spawn  # noqa: E402

SMALL = dict(context=64, block=32, batch=2, checkpoint_every=4, log_every=2, eval_every=100, eval_contexts=1, lr=0.02)
SMALL |= dict(device="cpu", tracker="none")


def documents():
    return list(tokens(4, 80))


def make(**settings):
    return retrofit(tiny(), RetrofitConfig(max_span=64, ramp=4, **settings))


def test_it_learns_to_meet_the_budget(tmp_path):
    retrofitted = make()
    model, before = retrofitted.model, {name: x.clone() for name, x in retrofitted.model.state_dict().items()}
    settings = DistillConfig(budget=0.5, steps=36, gain=0.8, anneal=0.3, decay=0.0, **SMALL | dict(lr=0.06))
    run = distill(retrofitted, documents(), settings, tmp_path / "run")
    result = run.read_result()
    assert 20 < result["live_at_end"] < 64 and result["target"] == 32, result  # of a text that it has not seen
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
    lines = [line for line in run.read_metrics() if line["split"] == "train"]
    assert [line["step"] for line in lines] == list(range(2, 37, 2)) and len(lines[0]["live"]) == 2
    assert lines[0]["live"] == pytest.approx([64, 64]) and lines[0]["loss"] < 1e-5 < lines[-1]["loss"]
    assert 20 < sum(lines[-1]["live"]) / 2 < 44
    retrofitted.detach()
    assert load_adapter(model, run.path / "adapter").config.max_span == 64
    assert main(["report", str(run.path)]) == 0
    page = (run.path / "report.html").read_text()
    assert "taught a Hugging Face model" in page and "of the tokens that it has read" in page


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    """Stopped in the middle of a line of metrics, with one made after its last checkpoint."""
    short = pytest.MonkeyPatch()
    short.setattr(calibration, "STEPS", 20)
    settings = DistillConfig(budget=0.5, steps=8, calibrate=2, **SMALL | dict(checkpoint_every=3))
    retrofitted = make()
    whole = distill(retrofitted, documents(), settings, tmp_path / "whole")
    wanted = retrofitted.learned()

    class Stop(Exception):
        pass

    step = DistillLearner.step

    def stop(self, index):
        if index == 5:
            raise Stop
        return step(self, index)

    monkeypatch.setattr(DistillLearner, "step", stop)
    with pytest.raises(Stop):
        distill(make(), documents(), settings, tmp_path / "cut")
    monkeypatch.undo()
    retrofitted = make()
    with pytest.raises(ValueError, match="has changed since it began"):
        distill_on(retrofitted, documents()[:-1], RunFolder.open(tmp_path / "cut"))
    run = distill_on(retrofitted, documents(), RunFolder.open(tmp_path / "cut"))
    assert all(torch.equal(x, wanted[name]) for name, x in retrofitted.learned().items())
    for name in ("metrics.jsonl", "adapter/adapter.safetensors", "result.json"):
        assert (run.path / name).read_bytes() == (whole.path / name).read_bytes(), name
    with pytest.raises(ValueError, match="is finished"):
        distill_on(retrofitted, documents(), run)
    short.undo()


def test_a_time_limit_ends_the_run_with_an_adapter(tmp_path):
    settings = DistillConfig(budget=0.5, steps=10**6, seconds=0.5, **SMALL)
    run = distill(make(), documents(), settings, tmp_path / "run")
    assert 0 < run.read_result()["step"] < 10**6 and (run.path / "adapter" / "adapter.safetensors").is_file()


def test_low_rank_additions_learn_too_and_come_off(tmp_path):
    pytest.importorskip("peft")
    retrofitted = make(initial_span=0.3)  # something expires from the first step on
    model, before = retrofitted.model, {name: x.clone() for name, x in retrofitted.model.state_dict().items()}
    ids, base = tokens(1, 50), None
    with torch.no_grad(), retrofitted.paused():
        base = model(ids, use_cache=False).logits
    retrofitted.add_lora(2)
    run = distill(
        retrofitted,
        documents(),
        DistillConfig(budget=0.5, steps=6, lora_rank=2, lora_lr=0.01, **SMALL),
        tmp_path / "run",
    )
    with torch.no_grad():
        learned = model(ids, use_cache=False).logits
        with retrofitted.paused():
            assert torch.equal(model(ids, use_cache=False).logits, base)  # the teacher stays what it was
    assert all(bool(x.any()) for name, x in retrofitted.learned().items() if "lora_B" in name)
    retrofitted.detach()
    assert {name: x.shape for name, x in model.state_dict().items()} == {name: x.shape for name, x in before.items()}
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    again = load_adapter(model, run.path / "adapter")
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, learned)
    with pytest.raises(ValueError, match="low-rank additions already"):
        again.add_lora(2)
    again.detach()
    with pytest.raises(ValueError, match="additions of rank 2, this retrofit of rank 0"):
        make().load(run.path / "adapter")


def test_spans_of_earlier_blocks_still_learn():
    """Gradients of contexts read in blocks are those of the context read at once, but for the frozen states between."""
    model = tiny().double()
    retrofitted = forgetful(model, max_span=40, ramp=8)
    retrofitted.predictors.double()
    model.requires_grad_(False)
    ids = tokens(2, 60)
    out = []
    for sizes in ([60], [20, 20, 20]):
        cache = retrofitted.new_cache(learning=True)
        logits = [model(part, past_key_values=cache).logits for part in ids.split(sizes, 1)]
        torch.cat(logits, 1)[:, 40:].square().mean().backward()
        last = retrofitted.predictors["1"].weight.grad.clone()  # the last layer's: nothing behind it is cut off
        retrofitted.predictors.zero_grad()
        out.append((torch.cat(logits, 1).detach(), last))
    assert (out[0][0] - out[1][0]).abs().max() < DOUBLE
    assert torch.allclose(out[0][1], out[1][1], rtol=0, atol=DOUBLE) and out[0][1].abs().max() > 1e-4


def test_what_is_read_in_blocks_diverges_as_the_whole_context():
    """The divergence of blocks of unequal length is the mean over all tokens."""
    model, ids = tiny().double(), tokens(2, 64)
    retrofitted = forgetful(model, max_span=8, ramp=4)
    retrofitted.predictors.double()
    learner = Distiller(retrofitted, documents(), DistillConfig(budget=0.25, **SMALL | dict(block=24)))
    with torch.no_grad():
        divergence, *_ = learner.read(Contexts.plain(ids))
        given = model(ids, use_cache=False).logits
        with retrofitted.paused():
            wanted = model(ids, use_cache=False).logits
    whole = float(kl_divergence(wanted, given))  # a mean over 128 tokens in float32
    assert float(divergence) == pytest.approx(whole, rel=reordered(128)) and whole > 1e-4


def test_the_divergence_and_its_gradient():
    """In more pieces than one, and against torch's own; only the student gets a gradient."""
    torch.manual_seed(0)
    wanted, given = torch.randn(3, 700, 11, dtype=torch.float64), torch.randn(3, 700, 11, requires_grad=True)
    loss = kl_divergence(wanted.float(), given)
    (2 * loss).backward()
    twin = given.detach().double().requires_grad_()
    each = torch.nn.functional.kl_div(twin.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="none")
    (2 * each.sum(-1).mean()).backward()
    assert abs(loss.item() - each.sum(-1).mean().item()) < 1e-5
    assert (given.grad - twin.grad).abs().max() < 1e-9


def test_the_rate_falls_at_the_end_and_the_budget_at_the_beginning():
    retrofitted = retrofit(tiny(), RetrofitConfig(max_span=64, ramp=4))
    learner = Distiller(retrofitted, documents(), DistillConfig(budget=0.25, anneal=0.5, decay=0.5, **SMALL))
    for share, rate, target in ((0.0, 0.02, 64), (0.25, 0.02, 32), (0.5, 0.02, 16), (0.75, 0.01, 16), (1.0, 1e-3, 16)):
        learner.set_rate(share)
        assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        assert learner.target_at(share) == pytest.approx(target)


def test_budgets_in_shares_tokens_and_bytes():
    retrofitted = retrofit(tiny(), RetrofitConfig(max_span=64, ramp=8))
    per_token = retrofitted.bytes_per_token
    assert per_token == 2 * 2 * (2 * 8 * 4 + 12)  # layers, heads, keys and values of 8 float32, span and position
    for given in (dict(budget=0.5), dict(budget_tokens=32), dict(budget_bytes=32 * per_token)):
        assert DistillConfig(**given, **SMALL).target(8, per_token) == 32
    for given, said in (
        (dict(budget=1.5), r"must lie in \(0, 1\], got 1.5"),
        (dict(), "give one of budget, budget_tokens and budget_bytes, got none"),
        (dict(budget=0.5, budget_tokens=3), "give one of budget"),
        (dict(budget_tokens=100), "more than the context of 64 tokens"),
        (dict(budget=0.05), "so 8 is the least budget, got 3.2 memories; give more, or a shorter ramp"),
    ):
        with pytest.raises(ValueError, match=said):
            Distiller(retrofitted, documents(), DistillConfig(**given, **SMALL))
    with pytest.raises(ValueError, match="every layer of MistralForCausalLM has a window of its own"):
        Distiller(retrofit(tiny("mistral")), documents(), DistillConfig(budget=0.5, **SMALL))
    with pytest.raises(
        ValueError, match="GPT2LMHeadModel has a learned table of 2048 positions, got a context of 3000 tokens"
    ):
        Distiller(
            retrofit(tiny("gpt2")), list(tokens(1, 3000)), DistillConfig(budget=0.5, **SMALL | dict(context=3000))
        )
    with pytest.raises(ValueError, match="no document has a context of 64 tokens, the longest has 9"):
        Distiller(retrofitted, [torch.arange(9)], DistillConfig(budget=0.5, **SMALL))


# Commands


def test_a_chat_is_proposed_where_contexts_begin_with_a_turn(tmp_path):
    """Any other model would refuse it."""
    (tmp_path / "adapter").mkdir()
    for begins, word in (
        ({"text": [1], "context": [1, 7]}, "chat"),
        ({"text": [1], "context": [1]}, "generate"),
        (None, "gen"),
    ):
        (tmp_path / "adapter" / "adapter.json").write_text(json.dumps({"begins_with": begins}))
        assert f"expire-span {word}" in tell_next(SimpleNamespace(path=tmp_path), "M").splitlines()[-1]


def test_the_commands_end_to_end(tmp_path, capsys, monkeypatch):
    folder, book = model_folder(tmp_path / "model"), tmp_path / "book.txt"
    book.write_text(text())
    adapter, sizes = (
        str(tmp_path / "run" / "adapter"),
        ["--tracker", "none", "--max-span", "96", "--ramp", "8", "--context", "96"],
    )
    sizes += ["--block", "48", "--batch", "1", "--steps", "6", "--lr", "0.02"]
    common = ["--data", str(book), "--device", "cpu"]
    assert (
        main(["retrofit", str(folder), "--out", str(tmp_path / "run"), "--budget-tokens", "40", *common, *sizes]) == 0
    )
    said = capsys.readouterr()
    assert "(budget 40)" in said.out and "tokens, documents: 1" in said.err and "fitting spans" in said.err
    assert f"next: expire-span verify {adapter}" in said.out
    assert f"generate {folder} --adapter {adapter} --prompt" in said.out  # it has no chat template
    assert main(["verify", adapter, "--tokens", "160", "--device", "cpu"]) == 0
    assert "intact, made for" in capsys.readouterr().out
    assert main(["generate", str(tmp_path / "run"), "--prompt", "a"]) == 2
    assert f"with: expire-span generate {folder} --adapter {adapter}" in capsys.readouterr().err
    out = ["--context", "400", "--documents", "2", "--questions", "1", "--out", str(tmp_path / "table")]
    asked = ["--methods", "none,sinks,snap,expire", "--budgets", "0.25", "--chunk", "32"]
    assert main(["evaluate-cache", str(folder), "--adapter", adapter, *common, *out, *asked]) == 0
    assert "expire - snap at 0.25" in capsys.readouterr().out
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["none", "sinks", "snap", "expire"]
    assert all(row["peak_bytes"] <= row["budget_bytes"] and row["accuracy"] is not None for row in rows)
    assert (tmp_path / "table.png").stat().st_size > 1000
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nand again\n\n"))
    assert main(["chat", str(folder), "--adapter", adapter, "--device", "cpu"]) == 2
    assert "has no chat template, so it has learned no turns; go on from a text with: expire-span generate" in (
        capsys.readouterr().err
    )
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    tokenizer.save_pretrained(folder)
    assert main(["chat", str(folder), "--adapter", adapter, "--max-tokens", "5", "--device", "cpu"]) == 0
    assert "tokens read" in capsys.readouterr().err


@pytest.mark.long
def test_a_killed_command_goes_on_to_the_same_bits(tmp_path, capsys):
    """The real command, ended by SIGKILL between two checkpoints and resumed, writes the adapter of an unbroken run.

    Its short twin is `test_an_interrupted_run_goes_on_as_if_it_had_not_been`, in one process.
    """
    folder, book = model_folder(tmp_path / "model"), tmp_path / "book.txt"
    book.write_text(text())
    words = ["retrofit", str(folder), "--data", str(book), "--device", "cpu", "--tracker", "none", "--budget", "0.5"]
    words += ["--max-span", "64", "--ramp", "8", "--context", "64", "--block", "32", "--batch", "1", "--lr", "0.02"]
    words += ["--steps", "60", "--checkpoint-every", "7", "--log-every", "1", "--calibrate", "2", "--keep-first", "2"]
    process = spawn(*words, "--out", str(tmp_path / "killed"))
    lines, deadline = tmp_path / "killed" / "metrics.jsonl", time.monotonic() + 120
    while not lines.exists() or lines.read_bytes().count(b"\n") < 10:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert not (tmp_path / "killed" / "adapter").exists()  # it was killed on the way
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the other process had: equal bits need equal sums
    try:
        assert main([*words, "--out", str(tmp_path / "whole")]) == 0
        assert main(["resume", str(tmp_path / "killed")]) == 0
    finally:
        torch.set_num_threads(threads)
    assert "resum" in capsys.readouterr().out
    for name in ("adapter/adapter.safetensors", "metrics.jsonl", "result.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def config_folder(path, kind):
    """A model folder whose config alone is read: its weights are not what they should be."""
    transformers.AutoConfig.for_model(kind).save_pretrained(path)
    (path / "model.safetensors").write_bytes(b"none")
    return path


def test_commands_say_what_is_wrong(tmp_path, capsys):
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    book = tmp_path / "book.txt"
    book.write_text(text(50))
    bad = {kind: config_folder(tmp_path / kind, kind) for kind in ("t5", "llama")}
    data = ["--data", str(book)]
    adapter = tmp_path / "adapter"
    forgetful(tiny()).save(adapter)
    for words, said in (
        (
            ["verify", str(bad["llama"])],
            "holds a Hugging Face model (llama) and no run; teach it to forget with: expire-",
        ),
        (["verify", str(adapter)], "does not say where its LlamaForCausalLM is; give it with --model"),
        (
            ["generate", str(adapter)],
            "holds an adapter and no run; it goes with its model: expire-span generate or chat MODEL",
        ),
        (
            ["retrofit", str(bad["t5"]), *data],
            "needs a decoder-only model, got the encoder-decoder T5Config (t5)",
        ),
        (
            ["evaluate-cache", str(bad["t5"]), *data, "--methods", "none"],
            "needs a decoder-only model, got the encoder-",
        ),
        (["retrofit", str(tmp_path / "no" / "model"), *data], "no model at"),
        (
            ["chat", str(bad["llama"]), "--adapter", str(adapter), "--device", "tpu"],
            "auto, cpu, cuda, cuda:N or spread, got 'tpu'",
        ),
        (
            ["verify", str(adapter), "--model", str(bad["llama"]), "--device", "cuda:99"],
            "device cuda:99 needs a GPU of",
        ),
        (["verify", str(adapter), "--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["evaluate-cache", "m", *data, "--methods", "magic"], "unknown method 'magic'; known are none, window"),
        (["retrofit", "m", *data, "--keep-first", "-1"], "keep_first must lie in [0, max_span], got -1"),
        (["retrofit", str(pickled), "--data", str(book)], "has pickled weights only (pytorch_model.bin)"),
        (
            ["retrofit", str(tmp_path), "--data", str(book)],
            "has no model.safetensors and no model.safetensors.index.json",
        ),
        (["retrofit", "m", "--data", str(tmp_path / "no")], "no text at"),
        (
            ["retrofit", "m", *data, "--ramp", "512"],  # before a model is looked for
            "every memory lives for its ramp of 512 tokens and 4 first tokens are kept, so 516 is the least budget, got 512",
        ),
        (
            ["retrofit", "m", *data, "--budget", "1", "--keep-first", "0", "--ramp", "64", "--context", "64"],
            "a ramp must be shorter than the context, or nothing is ever deleted in training, got ramp 64 and context 64",
        ),
        (["retrofit", "m", "--data", str(book), "--budget", "2"], "must lie in (0, 1], got 2.0"),
        (["verify", str(tmp_path)], "it has no adapter.json"),
        (["evaluate-cache", "m", "--data", str(book)], "method expire needs --adapter, got none"),
        (
            ["evaluate-cache", "m", "--data", str(book), "--methods", "none", "--budgets", "7"],
            "shares in (0, 1], got 7",
        ),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error
