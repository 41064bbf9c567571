"""Do the tasks read their files, ask what they should, score it, and say what is wrong with a file?"""

from __future__ import annotations

import gzip
import json
import math

import pytest

from hf_mlspec.evaluation import TASKS
from hf_mlspec.evaluation.tasks import choices, generation, texts

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.model import LM  # noqa: E402 - only where lm_eval is
from lm_eval.tasks import TaskManager  # noqa: E402

GSM8K = [{"question": f"{n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(9)]
MATH = {"problem": "Half of 1?", "solution": r"It is $\boxed{\frac{1}{2}}$."}
MBPP = [{"task_id": n, "text": "Double x.", "test_list": ["assert f(1) == 2", "assert f(r) == 6"],
         "test_setup_code": "r = f(1) + 1"} for n in (10, 11, 12, 511)]  # fmt: skip
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": 'def f(x):\n    """Double x."""\n', "entry_point": "f",
             "test": "def check(candidate):\n    assert candidate(1) == 2\n"}  # fmt: skip
PIQA = {"goal": "Open it", "sol1": "pull", "sol2": "push hard"}
FILLED = {"sentence": "Ann met Eve, and _ smiled.", "option1": "Ann", "option2": "Eve", "answer": "2"}
OPTIONS = {"context_options": ["Ann met Eve, and Ann", "Ann met Eve, and Eve"], "continuation": "smiled.", "gold": 1}
ARC = {"question": {"stem": "Hot?", "choices": [{"text": "ice", "label": "A"}, {"text": "fire", "label": "B"}]},
       "answerKey": "B"}  # fmt: skip
HELLASWAG = {"activity_label": "Baking", "ctx_a": "A man bakes.", "ctx_b": "he", "label": 2,
             "endings": ["sinks.", "flies.", "[substeps] eats.", "sings."]}  # fmt: skip
ARTICLES = "\n = One = \n \n Some words here . \n \n = = Section = = \n \n More . \n \n = Two = \n \n Other words . \n"


def write(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    else:
        items = content if isinstance(content, list) else [content]
        path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


@pytest.fixture
def data(tmp_path):
    files = {
        "gsm8k/test.jsonl": GSM8K[:2], "gsm8k/train.jsonl": GSM8K, "math/test/algebra/1.json": MATH,
        "math/train/algebra/10.json": MATH | {"problem": "last"}, "math/train/algebra/2.json": MATH,
        "math/train/algebra/3.json": MATH, "math/train/geometry/1.json": MATH, "mbpp/mbpp.jsonl": MBPP,
        "humaneval/HumanEval.jsonl": HUMANEVAL, "piqa/valid.jsonl": PIQA, "piqa/valid-labels.lst": "1\n",
        "piqa/train.jsonl": [PIQA] * 10, "piqa/train-labels.lst": "0\n1\n" * 5, "winogrande/dev.jsonl": FILLED,
        "winogrande/train_xl.jsonl": [FILLED] * 5, "arc/ARC-Easy/ARC-Easy-Test.jsonl": ARC,
        "arc/ARC-Challenge/ARC-Challenge-Test.jsonl": ARC, "hellaswag/hellaswag_val.jsonl": HELLASWAG,
        "lambada/lambada_test.jsonl": {"text": "They went to the sea"}, "wikitext2/test.txt": ARTICLES,
    }  # fmt: skip
    for name, content in files.items():
        write(tmp_path, name, content)
    return tmp_path


class Answers(LM):
    """Writes one text, finds a text likelier the longer it is, and remembers what it was asked."""

    def __init__(self, text=""):
        super().__init__()
        self.text, self.asked = text, []

    def _remember(self, requests):
        self.asked += [request.args for request in requests]
        return requests

    def generate_until(self, requests, disable_tqdm=False):
        return [self.text for _ in self._remember(requests)]

    def loglikelihood(self, requests, disable_tqdm=False):
        return [(-1.0 / len("".join(request.args)), True) for request in self._remember(requests)]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        return [-float(len(request.args[0].split())) for request in self._remember(requests)]


def score(task, folder, text="", **options):
    model = Answers(text)
    manager = TaskManager(include_path=TASKS, include_defaults=False, metadata={"data": str(folder)})
    found = lm_eval.simple_evaluate(model=model, tasks=[task], task_manager=manager, bootstrap_iters=0, **options)
    scores = {name.split(",")[0]: value for name, value in found["results"][task].items() if "stderr" not in name}
    return model.asked, scores, found["samples"][task]


def test_every_task_is_found():
    names = "gsm8k math mbpp humaneval piqa piqa_0shot winogrande winogrande_0shot arc_easy arc_challenge hellaswag"
    found = TaskManager(include_path=TASKS, include_defaults=False).all_tasks
    assert sorted(found) == sorted(f"mlspec_{name}" for name in [*names.split(), "lambada", "wikitext2"])


def test_gsm8k(data):
    asked, scores, _ = score("mlspec_gsm8k", data, "0 + 1 = 1\n#### 1")
    shots = "".join(f"Question: {item['question']}\nAnswer: {item['answer']}\n\n" for item in GSM8K[:8])
    assert [prompt for prompt, _ in asked] == [f"{shots}Question: {n} + 1?\nAnswer:" for n in (0, 1)]
    assert asked[0][1] == {"until": ["Question:"], "max_gen_toks": 256, "do_sample": False}
    assert (scores["exact_match"], scores["flexible_match"]) == (0.5, 0.5)
    _, scores, _ = score("mlspec_gsm8k", data, "the answer is 2.00")
    assert (scores["exact_match"], scores["flexible_match"]) == (0.0, 0.5)


def test_math(data):
    asked, scores, _ = score("mlspec_math", data, r"so \boxed{0.5}")
    prompt = asked[0][0]
    assert prompt.count(f"Problem:\nHalf of 1?\n\nSolution: {MATH['solution']}\n\n") == 3
    assert prompt.index("Problem:\nlast") > prompt.index("Half")  # 10.json comes after 3.json
    assert prompt.endswith("Problem:\nHalf of 1?\n\nSolution:")
    assert scores["exact_match"] == 1.0
    (data / "math/test/algebra/1.json").unlink()
    (data / "math/test/algebra").rmdir()
    (data / "math/test").rmdir()
    write(data, "math/test.jsonl", [MATH, MATH])
    assert len(generation.math(data)["test"]) == 2


@pytest.mark.parametrize(("text", "passed"), [
    ("def f(x):\n    return 2 * x\n", 1.0), ("def f(x):\n    return 1\n", 0.0), ("import os\nos._exit(0)\n", 0.0),
])  # fmt: skip
def test_mbpp(data, text, passed):
    asked, scores, samples = score("mlspec_mbpp", data, text)
    assert [prompt for prompt, _ in asked] == ['"""\nDouble x.\nassert f(1) == 2\nassert f(r) == 6\n"""\n'] * 2
    assert scores["pass@1"] == passed
    assert samples[0]["filtered_resps"][0][0]["passed"] is bool(passed)
    json.dumps(samples)


@pytest.mark.parametrize(("text", "passed"), [("    return 2 * x", 1.0), ("    return x", 0.0), ("return", 0.0)])
def test_humaneval(data, text, passed):
    asked, scores, samples = score("mlspec_humaneval", data, text)
    assert asked[0][0] == HUMANEVAL["prompt"]
    assert scores["pass@1"] == passed
    assert samples[0]["filtered_resps"][0][0]["kind"] == {"    return 2 * x": "passed", "    return x": "failed",
                                                          "return": "syntax"}[text]  # fmt: skip


def test_humaneval_as_it_is_fetched(data):
    path = data / "humaneval/HumanEval.jsonl"
    with gzip.open(f"{path}.gz", "wb") as file:
        file.write(path.read_bytes())
    path.unlink()
    assert generation.humaneval(data)["test"][0]["prompt"] == HUMANEVAL["prompt"]


@pytest.mark.parametrize("content", [gzip.compress(b"{}\n" * 99)[:-9], b"{}\n", b"\x1f\x8b\x08\0" + b"x" * 40],
                         ids=["cut", "never compressed", "damaged"])  # fmt: skip
def test_half_a_file(data, content):
    (data / "humaneval/HumanEval.jsonl").unlink()
    (data / "humaneval/HumanEval.jsonl.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"HumanEval\.jsonl\.gz cannot be read: .*; fetch the file again"):
        generation.humaneval(data)


def test_a_folder_is_no_file(data):
    (data / "mbpp/mbpp.jsonl").unlink()
    (data / "mbpp/mbpp.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"mbpp\.jsonl cannot be read: .*directory"):
        generation.mbpp(data)


def test_piqa(data):
    asked, scores, _ = score("mlspec_piqa", data)
    shots = "Question: Open it\nAnswer: pull\n\nQuestion: Open it\nAnswer: push hard\n\n" * 5
    assert asked == [(f"{shots}Question: Open it\nAnswer:", end) for end in (" pull", " push hard")]
    assert scores["acc"] == 1.0
    assert score("mlspec_piqa_0shot", data)[0][0] == ("Question: Open it\nAnswer:", " pull")


@pytest.mark.parametrize("item", [FILLED, OPTIONS], ids=["official", "options"])
def test_winogrande(data, item):
    write(data, "winogrande/dev.jsonl", item)
    asked, scores, _ = score("mlspec_winogrande", data)
    shots = "Ann met Eve, and Eve smiled.\n\n" * 5
    assert asked == [(f"{shots}Ann met Eve, and Ann", " smiled."), (f"{shots}Ann met Eve, and Eve", " smiled.")]
    assert scores["acc"] in (0.0, 1.0)


def test_arc_and_hellaswag(data):
    for task in ("mlspec_arc_easy", "mlspec_arc_challenge"):
        asked, scores, _ = score(task, data)
        assert asked == [("Question: Hot?\nAnswer:", " ice"), ("Question: Hot?\nAnswer:", " fire")]
        assert scores["acc"] == 1.0
    asked, scores, _ = score("mlspec_hellaswag", data)
    assert asked == [("Baking: A man bakes. He", f" {end}") for end in ("sinks.", "flies.", "eats.", "sings.")]
    assert "acc_norm" in scores


def test_lambada(data):
    asked, scores, _ = score("mlspec_lambada", data)
    assert asked == [("They went to the", " sea")]
    assert scores["acc"] == 1.0
    assert scores["perplexity"] == pytest.approx(math.exp(1 / len("They went to the sea")))
    (data / "lambada/lambada_test.jsonl").unlink()
    write(data, "lambada/lambada_test_plain_text.txt", "They went to the sea\nand back again\n")
    assert texts.lambada(data)["test"]["target"] == [" sea", " again"]


def test_wikitext2(data):
    asked, scores, _ = score("mlspec_wikitext2", data)
    assert "".join(text for (text,) in asked) == ARTICLES.lstrip("\n")
    assert [text.splitlines()[0] for (text,) in asked] == [" = One = ", " = Two = "]
    words, size = len(ARTICLES.split()), len(ARTICLES.lstrip("\n").encode())
    assert scores["word_perplexity"] == pytest.approx(math.e)
    assert scores["byte_perplexity"] == pytest.approx(math.exp(words / size))
    assert scores["bits_per_byte"] == pytest.approx(words / size / math.log(2))


def test_a_missing_train_file_matters_only_with_shots(data):
    (data / "gsm8k/train.jsonl").unlink()
    assert score("mlspec_gsm8k", data, num_fewshot=0)[0][0][0] == "Question: 0 + 1?\nAnswer:"
    with pytest.raises(FileNotFoundError, match=r"gsm8k/train\.jsonl is not in .*grade-school-math.*--num_fewshot 0"):
        score("mlspec_gsm8k", data)
    for name in ("piqa/train.jsonl", "winogrande/train_xl.jsonl"):
        (data / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"{name} is not in .*--num_fewshot 0"):
            score(f"mlspec_{name.split('/')[0]}", data)
    write(data, "gsm8k/train.jsonl", "")
    assert score("mlspec_gsm8k", data, num_fewshot=0)[0]
    with pytest.raises(FileNotFoundError, match=r"gsm8k/train\.jsonl holds none.*--num_fewshot 0"):
        score("mlspec_gsm8k", data)


def test_fewer_examples_than_shots(data):
    write(data, "gsm8k/train.jsonl", GSM8K[:3])
    assert score("mlspec_gsm8k", data, num_fewshot=3)[0][0][0].count("Question") == 4
    with pytest.raises(FileNotFoundError, match=r"gsm8k/train\.jsonl holds 3, and example 4 is asked for: say "
                                                r"--num_fewshot 3"):
        score("mlspec_gsm8k", data)


@pytest.mark.parametrize("task", [
    generation.gsm8k, generation.math, generation.mbpp, generation.humaneval, choices.piqa, choices.winogrande,
    choices.arc_easy, choices.arc_challenge, choices.hellaswag, texts.lambada, texts.wikitext2,
], ids=lambda task: task.__name__)  # fmt: skip
def test_a_missing_test_file_says_what_to_fetch(task, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=rf"is not in {tmp_path}: put there .*; layout: .*README\.md"):
        task(str(tmp_path))
    monkeypatch.delenv("MLSPEC_DATA", raising=False)
    with pytest.raises(ValueError, match="no data folder: set MLSPEC_DATA=FOLDER"):
        task()
    monkeypatch.setenv("MLSPEC_DATA", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match=r"none .*is not a folder"):
        task()


def test_the_folder_of_the_environment(data, monkeypatch):
    monkeypatch.setenv("MLSPEC_DATA", str(data))
    assert len(generation.gsm8k(pretrained="x", version=1.0)["test"]) == 2


def without(item, field):
    return {name: value for name, value in item.items() if name != field}


@pytest.mark.parametrize(("task", "name", "content", "error"), [
    (generation.gsm8k, "gsm8k/test.jsonl", [GSM8K[0], without(GSM8K[0], "answer")], "line 2, field 'answer': missing"),
    (generation.gsm8k, "gsm8k/test.jsonl", GSM8K[0] | {"question": 5}, "line 1, field 'question': int, expected str"),
    (generation.gsm8k, "gsm8k/test.jsonl", GSM8K[0] | {"answer": "5"}, "field 'answer': no number after '####'"),
    (generation.gsm8k, "gsm8k/train.jsonl", "\n{\n", "train.jsonl, line 2: no JSON object"),
    (generation.gsm8k, "gsm8k/test.jsonl", "[1]\n", "line 1: a list, expected a JSON object"),
    (generation.gsm8k, "gsm8k/test.jsonl", "\n", "holds no items"),
    (generation.gsm8k, "gsm8k/test.jsonl", "[" * 10**5, "line 1: no JSON object"),
    (generation.gsm8k, "gsm8k/test.jsonl", '{"question": "\\ud800"}\n', "line 1: no JSON object .*surrogates"),
    (generation.math, "math/test/algebra/1.json", MATH | {"solution": "x"}, r"1\.json, field 'solution': no \\boxed"),
    (generation.mbpp, "mbpp/mbpp.jsonl", MBPP[1] | {"test_list": []}, "field 'test_list': expected one text or more"),
    (generation.mbpp, "mbpp/mbpp.jsonl", MBPP[:1], r"mbpp\.jsonl holds no task with a task_id from 11 to 510, "),
    (generation.mbpp, "mbpp/mbpp.jsonl", MBPP[0] | {"task_id": True}, "field 'task_id': bool, expected int"),
    (choices.piqa, "piqa/valid-labels.lst", "1\n0\n", "valid-labels.lst has 2 lines, but its items are 1"),
    (choices.piqa, "piqa/valid-labels.lst", "2\n", "valid-labels.lst, line 1: b'2.n' is no label; expected 0 or 1"),
    (choices.winogrande, "winogrande/dev.jsonl", FILLED | {"sentence": "x"}, "field 'sentence': no _ in it"),
    (choices.winogrande, "winogrande/dev.jsonl", FILLED | {"answer": "3"}, "field 'answer': '3', expected '1' or '2'"),
    (choices.winogrande, "winogrande/dev.jsonl", OPTIONS | {"gold": 2}, "field 'gold': 2, expected 0 or 1"),
    (choices.arc_easy, "arc/ARC-Easy/ARC-Easy-Test.jsonl", ARC | {"answerKey": "E"}, "'E' is none of the labels"),
    (choices.hellaswag, "hellaswag/hellaswag_val.jsonl", HELLASWAG | {"label": 4}, "'label': 4, expected 0 to 3"),
    (choices.hellaswag, "hellaswag/hellaswag_val.jsonl", HELLASWAG | {"endings": ["x"]}, "expected four texts"),
    (texts.lambada, "lambada/lambada_test.jsonl", {"text": "word"}, "line 1: a passage needs words before its last"),
    (texts.wikitext2, "wikitext2/test.txt", "no titles", "no line ' = Title = '"),
    (texts.wikitext2, "wikitext2/test.txt", " = One = \r\n x \r\n", "line ends of Windows"),
    (texts.wikitext2, "wikitext2/test.txt", "lost\n" + ARTICLES, "text before the first line ' = Title = ': 'lost'"),
])  # fmt: skip
def test_a_malformed_file_is_named(data, task, name, content, error):
    write(data, name, content)
    with pytest.raises(ValueError, match=error):
        task(str(data))


def test_other_bytes_and_missing_labels(data):
    (data / "gsm8k/test.jsonl").write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(ValueError, match=r"test\.jsonl, line 1: no JSON object .*utf-8"):
        generation.gsm8k(data)
    (data / "wikitext2/test.txt").write_bytes(b" = One = \n \xff\n")
    with pytest.raises(ValueError, match=r"test\.txt, line 2: not UTF-8"):
        texts.wikitext2(data)
    (data / "piqa/valid-labels.lst").unlink()
    with pytest.raises(FileNotFoundError, match=r"valid-labels\.lst is missing next to valid\.jsonl"):
        choices.piqa(data)
