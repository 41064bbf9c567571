"""Do mlspec demo, verify, generate and info say what they found?"""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import hf_mlspec
from hf_mlspec.cli import main, verify
from hf_mlspec.cli.request import read_prompts
from hf_mlspec.cli.stream import LiveTable, TextStream
from hf_mlspec.cli.tables import show, why_slower
from hf_mlspec.demo_pair import demo_prompts
from hf_mlspec.engines.architecture import KNOWN
from hf_mlspec.engines.architecture.families.wrappers import WRAPPERS
from hf_mlspec.integration.compare import Comparison
from hf_mlspec.integration.levels.load import load_causal_lm
from hf_mlspec.integration.stream import shown
from hf_mlspec.speculation.stats import PlanStats, SpeculationStats

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ["def area(radius):", "Once upon a time", "x"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    return str(path)


def test_verify_finds_a_lossless_chain_lossless(capsys, saved_model, prompts):
    status = main(["verify", str(saved_model), "--level", "mxfp4", "--prompts", prompts, "--max-new-tokens", "8"])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert lines[-1] == "ids identical: 3 of 3 prompts"
    assert lines[-2] == "tokens compared: 24"
    spoken = re.compile(r"tokens per target pass: [\d.]+; the chain is [\d.]+ x as fast as")
    assert any(spoken.match(line) for line in lines[-4:-2])  # behind it, of a slow chain: why
    assert any(line.startswith("  mxfp4: drafted ") for line in lines)


def test_verify_prints_one_json_object(capsys, saved_model, prompts):
    status = main(["verify", str(saved_model), "--level", "prompt_lookup", "--prompts", prompts, "--max-new-tokens",
                   "8", "--batch-size", "2", "--limit", "2", "--num-draft-tokens", "3", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert status == 0
    assert (told["prompts"], told["identical"], told["failing"], told["tokens_compared"]) == (2, 2, 0, 16)
    assert told["asked"]["levels"] == ["prompt_lookup"]
    assert told["asked"]["batch_size"] == 2


@pytest.fixture
def one_wrong_id(monkeypatch):
    """Verify against a target that is said to have written one other id: the comparison has to notice."""
    true_compare = verify.compare

    def compare(model, tokenizer, prompts, levels, **options):
        references = [item.ids for item in true_compare(model, tokenizer, prompts, [], **options).items]
        references[1][2] ^= 1
        return true_compare(model, tokenizer, prompts, levels, reference_ids=references, **options)

    monkeypatch.setattr(verify, "compare", compare)


def test_verify_fails_on_one_wrong_id(capsys, saved_model, prompts, one_wrong_id):
    asked = ["verify", str(saved_model), "--level", "mxfp4", "--prompts", prompts, "--max-new-tokens", "6"]
    assert main(asked) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ids identical: 2 of 3 prompts"
    assert any(line.startswith("different: prompt 1, new token 2: target alone id ") for line in lines)
    assert main([*asked, "--tolerate-ties", "1e-9"]) == 1
    assert "different: prompt 1" in capsys.readouterr().out
    assert main([*asked, "--tolerate-ties", "1e9"]) == 0
    assert "a tie, tolerated: prompt 1" in capsys.readouterr().out


def test_generate_compares(capsys, saved_model):
    status = main(["generate", "--model", str(saved_model), "--level", "mxfp4", "--level", "ngram", "--prompt", "x = ",
                   "--max-new-tokens", "10", "--compare", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert status == 0
    assert len(told["ids"]) == 10
    assert told["identical"] == 1
    assert [level["name"] for level in told["speculation"]["levels"]] == ["mxfp4", "ngram"]


def test_generate_samples_the_same_for_the_same_seed(capsys, saved_model):
    texts = []
    for seed in ("1", "1", "2"):
        main(["generate", "--model", str(saved_model), "--level", "mxfp4", "--prompt", "x", "--max-new-tokens", "12",
              "--do-sample", "--temperature", "1.5", "--top-k", "50", "--seed", seed, "--json"])
        texts.append(json.loads(capsys.readouterr().out)["ids"])
    assert texts[0] == texts[1] != texts[2]


def test_generate_streams_the_text(capsys, saved_model):
    asked = ["generate", "--model", str(saved_model), "--prompt", "def f(", "--max-new-tokens", "9"]
    assert main([*asked, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert main(asked) == 0
    assert capsys.readouterr().out.startswith("def f(" + text.split("\ufffd")[0])


def test_info_tells_versions_kernels_and_hook(capsys):
    assert main(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hook"] == "on"
    assert told["versions"]["python"] == sys.version.split()[0]
    assert {(row["op"], row["device"], row["kernel"]) for row in told["kernels"]} == set(hf_mlspec.ops.kernel_table())
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "  mxfp4_linear on cpu: " not in shown
    assert re.search(r"kernels \(--kernels: of every op\)\n  on \w+: \S+: \d+ ops\n", shown)
    assert main(["info", "--kernels"]) == 0
    assert capsys.readouterr().out.startswith(shown.partition("  MLSPEC_CACHE")[0])
    assert main(["info", "--kernels"]) == 0
    assert "  mxfp4_linear on cpu: " in capsys.readouterr().out
    known = {"gptq", "awq", "auto-round", "compressed-tensors", "gguf", "mxfp4", "anyprec"}
    assert told["checkpoints"].keys() == known
    assert "  gguf: stock transformers\n" in shown
    assert (told["methods"]["quarot+gptq"], told["methods"]["atom"]) == ("int4, zipper", "int4-int8")
    assert "methods that choose codes on a text\n  rtn: int4, zipper\n" in shown
    every = ", ".join(name.removesuffix("ForCausalLM") for name in sorted(KNOWN))
    assert f"  whole decoders compiled: {every if told['compiled_decoder'] else 'none'}\n" in shown
    assert "  of these on a CPU, not on a GPU: Gemma4, HunYuanDenseV1, Llama4\n" in shown
    seen = re.search("  the text models inside of: (.+)\n", shown)[1].split(", ")
    inside = [name.removesuffix("ForConditionalGeneration") for name in sorted(WRAPPERS)]
    assert seen == (inside if told["compiled_decoder"] else ["none"])
    assert re.search(r"  mlspec batch --workers, --ray: (can run|lacks ray: pip install 'hf-mlspec\[ray\]')\n", shown)
    assert bool(told["compiled_decoder"]) == (told["kernels_problem"] is None)


def test_demo_writes_what_the_target_alone_writes(capsys):
    assert main(["demo", "--max-new-tokens", "12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    count = len(demo_prompts())
    assert lines[-1] == f"ids identical: {count} of {count} prompts"
    assert sum(line.startswith("target alone, ") for line in lines) == count
    assert sum(line.startswith(("  mxfp4: drafted ", "  draft: drafted ")) for line in lines) == 2


PLANS = {"off": PlanStats(rounds=6, timed=6, tokens=6, seconds=1.0, expected_tokens=6.0, expected_seconds=0.5)}
DRAFTS = {"mxfp4 4": PlanStats(rounds=6, timed=6, tokens=24, seconds=1.0, expected_tokens=24.0, expected_seconds=0.5)}


@pytest.mark.parametrize(("load", "plans", "seconds", "told"), [
    (0.5, PLANS, 1.02, ""),
    (9.6, PLANS, 1.5, "took 1.50 x the time of the target alone: the machine is busy (load 9.6 on 4 cores)"),
    (0.5, {}, 1.5, "draft lengths were given"),
    (0.5, PLANS, 1.5, 'most rounds were "off"'),
    (0.5, DRAFTS, 1.5, "its rounds were expected to write 48 tokens/s and wrote 24; mlspec tune"),
])
def test_a_chain_that_is_slower_says_why(monkeypatch, load, plans, seconds, told):
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    found = Comparison(speculation=SpeculationStats(plans=dict(plans)), chain_seconds=seconds, alone_seconds=1.0)
    line = why_slower(found)
    assert told in line
    assert bool(told) == bool(line)


def test_the_demo_parts_prompt_and_continuation_in_a_pipe(capsys):
    asked = ["demo", "--max-new-tokens", "6", "--level", "mxfp4", "--prompt", "def area(radius):"]
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert "-- prompt:\ndef area(radius):\n-- continuation:\n" in told
    assert told.endswith("ids identical: 1 of 1 prompts\n")


@pytest.mark.parametrize("levels", [["mxfp4+prompt_lookup"], ["mxfp4", "prompt_lookup"], ["mxfp4,prompt_lookup"]])
def test_levels_of_a_chain_are_joined_or_repeated(capsys, saved_model, levels):
    asked = [word for level in levels for word in ("--level", level)]
    assert main(["generate", "--model", str(saved_model), "--prompt", "x", "--max-new-tokens", "4", "--json",
                 *asked]) == 0
    told = json.loads(capsys.readouterr().out)["speculation"]["levels"]
    assert [level["name"] for level in told] == ["mxfp4", "prompt_lookup"]


def test_demo_on_another_model_in_json(capsys, saved_model):
    status = main(["demo", "--model", str(saved_model), "--level", "prompt_lookup", "--max-new-tokens", "6", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert status == 0
    assert told["levels"] == ["prompt_lookup"]
    assert told["identical"] == told["prompts"]


def test_the_console_script_is_the_module(capsys, monkeypatch):
    """`mlspec` and `python -m hf_mlspec` are one program."""
    assert 'mlspec = "mlspec_cli:main"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["hf_mlspec", "generate", "--model", "no/such/folder", "--prompt", "x"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hf_mlspec", run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err == ("mlspec generate: model folder 'no/such/folder' does not exist; give a folder "
                                       "written by save_pretrained\n")


def test_no_page_recommends_the_slow_way_to_start():
    """`python -m hf_mlspec` imports the package before it reads a word; `python -m mlspec_cli` does not."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("eval/**/*.md")]
    assert [page.name for page in pages if "python -m hf_mlspec" in page.read_text(encoding="utf-8")] == []


PINK = "48;5;201"  # behind the tokens of the first level


def test_a_live_table_shows_text_and_counts_while_it_grows(saved_model, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    # A colour of this test's own: rich keeps how it drew a style first, whatever terminal comes next.
    monkeypatch.setattr(shown, "_STYLES", ("", "on color(201)"))
    model, tokenizer = load_causal_lm(str(saved_model))
    console = Console(force_terminal=True, color_system="256", width=100, height=30, file=io.StringIO())
    table = LiveTable(console, tokenizer, model)
    found = hf_mlspec.compare(model, tokenizer, ["def f(", "x"], ["mxfp4"], max_new_tokens=20, streamer=table,
                              speculation_config={"num_draft_tokens": 3})
    written = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())  # without colours and cursor moves
    drafted = [int(number) for number in re.findall(r"mxfp4\s*│\s*(\d+)", written)]
    assert drafted == sorted(drafted)
    assert len(set(drafted)) > 2
    assert drafted[-1] == found.speculation.levels[0].drafted == table.finished.levels[0].drafted
    assert table.palette.levels == ["the target", "mxfp4"]
    accepted = found.speculation.levels[0].accepted
    assert accepted == 0 or PINK in console.file.getvalue()


@pytest.mark.parametrize(("terminal", "expected"), [(False, "  a: x 1, y 2"), (True, "─")])
def test_tables_are_plain_in_a_pipe(capsys, terminal, expected):
    show(Console(force_terminal=terminal, width=60), "title", ("", "x", "y"), [("a", "1", "2")])
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("p.txt", "one\n\n  \ntwo \n", ["one", "two "]), ("p.txt", "\ufeffone\n", ["one"]),
    ("p.jsonl", '\ufeff{"prompt": "a"}', ["a"]),
    ("p.jsonl", '{"task_id": 1, "prompt": "a\\n"}\n\n{"question": "b", "answer": "c"}\n', ["a\n", "b"])])
def test_prompts_are_read(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_prompts(str(tmp_path / name)) == expected
    assert read_prompts(str(tmp_path / name), 1) == expected[:1]


def test_an_error_in_the_middle_of_a_text_has_a_line_of_its_own(capsys, monkeypatch, saved_model):
    def show(self, text):
        self.text = text
        self.write(text)
        raise ValueError("no more")

    monkeypatch.setattr(TextStream, "_show", show)
    assert main(["generate", "--model", str(saved_model), "--prompt", "def f(", "--max-new-tokens", "3"]) == 2
    told = capsys.readouterr()
    assert told.out.startswith("def f(")
    assert told.out.endswith("\n")
    assert told.err == "mlspec generate: no more\n"


def test_a_prompt_that_nothing_follows_is_shown(capsys, saved_model):
    _, tokenizer = load_causal_lm(str(saved_model))
    stream = TextStream(Console(), tokenizer)
    stream.put(torch.tensor([tokenizer("def").input_ids]))
    assert capsys.readouterr().out == ""
    stream.put(torch.tensor([tokenizer.eos_token_id]))
    stream.end()
    assert capsys.readouterr().out.strip() == "def"


class Counting:
    """A tokenizer whose tokens are the bytes of a text; it counts those that it decodes."""

    def __init__(self):
        self.decoded = 0

    def decode(self, ids, skip_special_tokens):
        self.decoded += len(ids)
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("words", ["one word after another, ", "a line\n", "für die Länge, "])
def test_a_long_text_is_decoded_and_drawn_piece_by_piece(words, monkeypatch):
    monkeypatch.setattr("hf_mlspec.cli.stream.last_stats", lambda model: None)
    written = words * 60
    tokens = written.encode()
    tokenizer, console = Counting(), Console(force_terminal=True, width=30, height=12, file=io.StringIO())
    table = LiveTable(console, tokenizer, None)
    table.put(torch.tensor([list(tokens[:6])]))
    for at in range(6, len(tokens), 5):
        table.put_levels(["mxfp4", None])
        table.put(torch.tensor(list(tokens[at : at + 5])))
        whole, page = table._styled(), table._styled(table._page(5))
        assert whole.plain == table.text
        assert whole.plain.endswith(page.plain)
        assert len(page) <= 2 * 5 * 30
        if "\n" in words:
            shown_lines, all_lines = ([line.plain for line in one.wrap(console, 30)] for one in (page, whole))
            assert shown_lines[-5:] == all_lines[-5:]
    assert table.text == written
    assert tokenizer.decoded < 10 * len(tokens)
    table.end()
    assert re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue()).count(written) == 1


def test_half_a_character_at_the_end_is_shown_as_what_it_is(capsys):
    stream = TextStream(Console(), Counting())
    for ids in (b"ab", b"c", "ä".encode()[:1]):
        stream.put(torch.tensor(list(ids)))
    stream.end()
    assert capsys.readouterr().out == "abc\ufffd\n\n"


def test_a_prompt_may_end_in_the_middle_of_a_character(capsys):
    stream, tokens = TextStream(Console(), Counting()), "a日b".encode()
    for ids in (tokens[:2], tokens[2:3], tokens[3:]):
        stream.put(torch.tensor(list(ids)))
    stream.end()
    assert capsys.readouterr().out == "a日b\n\n"
