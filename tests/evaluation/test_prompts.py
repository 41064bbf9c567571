"""Is a file of prompts read in the layout of its release, and is a bad one refused with file, line and remedy?"""

from __future__ import annotations

import gzip
import json

import pytest

from hf_mlspec.evaluation import read_prompts

HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "canonical_solution": "    return x\n",
             "test": "def check(candidate):\n", "entry_point": "f"}
MC = {"choices": [{"text": "one", "label": "A"}, {"text": "two", "label": "B"}], "stem": "Which?"}
RELEASES = {
    "HumanEval": (HUMANEVAL, "def f(x):\n"),
    "GSM8K": ({"question": "How many?", "answer": "#### 2"}, "How many?"),
    "MT-Bench": ({"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}, "Write."),
    "Spec-Bench": ({"question_id": 1, "category": "qa", "turns": ["Who?"]}, "Who?"),
    "ARC": ({"id": "Mercury_1", "question": MC, "answerKey": "A"}, "Which?"),
    "MATH": ({"problem": "Find $x$.", "level": "Level 5", "type": "Algebra", "solution": "\\boxed{1}"}, "Find $x$."),
    "HumanEval of llm-foundry": (HUMANEVAL | {"language": "python", "test_inputs": ["1"]}, "def f(x):\n"),
    "GSM8K of llm-foundry": ({"context": "How many?", "chain_of_thought": "1 + 1", "answer": "2"}, "How many?"),
    "MATH of llm-foundry": ({"context": "Find.", "answer": "1", "category": "algebra"}, "Find."),
    "ARC of llm-foundry": ({"query": "Question: Which?", "choices": ["one", "two"], "gold": 0}, "Question: Which?"),
    "MBPP": ({"text": "Write it.", "code": "def f(): ...", "task_id": 1, "test_list": []}, "Write it."),
    "the demo pair": ({"name": "a", "kind": "code", "text": "import"}, "import"),
}


@pytest.mark.parametrize(("entry", "prompt"), RELEASES.values(), ids=RELEASES)
def test_a_release_is_read_as_lines_as_a_list_and_packed(tmp_path, entry, prompt):
    line = json.dumps(entry)
    (tmp_path / "a.jsonl").write_text(f"{line}\n\n{line}\n", encoding="utf-8")
    (tmp_path / "a.json").write_text(f"[{line}, {line}]", encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(f"{line}\n{line}".encode()))
    for name in ("a.jsonl", "a.json", "b.jsonl.gz"):
        assert read_prompts(tmp_path / name) == [prompt] * 2
        assert read_prompts(tmp_path / name, 1) == [prompt]


def test_a_folder_of_math_is_read_by_subject_and_number(tmp_path):
    for name in ("algebra/10", "algebra/9", "number_theory/1"):
        file = tmp_path / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"problem": name, "solution": ""}), encoding="utf-8")
    assert read_prompts(tmp_path) == ["algebra/9", "algebra/10", "number_theory/1"]
    assert read_prompts(tmp_path, 2) == ["algebra/9", "algebra/10"]


@pytest.mark.parametrize(("name", "content", "expected"), [
    ("p.txt", b"one\n\n  \ntwo \n", ["one", "two "]), ("p", b"one\r\ntwo\r\n", ["one", "two"]),
    ("p.txt", "\ufeff\u00e9\u2028x\n".encode(), ["\u00e9\u2028x"]), ("p.txt", b'{"prompt": "a"}', ['{"prompt": "a"}']),
    ("p.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n', ["a"]),
    ("p.jsonl", '{"prompt": "a\u2028b\u0085c"}\n'.encode(), ["a\u2028b\u0085c"]),
    ("p.jsonl", b'{"prompt": "a", "text": 3, "turns": []}', ["a"])])
def test_lines_end_where_files_end_them(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert read_prompts(tmp_path / name) == expected


def test_lines_behind_the_last_one_asked_for_are_not_looked_at(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\nno JSON\n')
    assert read_prompts(str(tmp_path / "p.jsonl"), 1) == ["a"]
    with pytest.raises(ValueError, match="line 2: no JSON"):
        read_prompts(tmp_path / "p.jsonl", 2)


BAD = {
    "nothing": ("p.txt", b"\n \n", r"p.txt' holds no prompts; write text with one prompt a line, or .jsonl"),
    "nothing in JSON": ("p.json", b"", "holds no prompts; write"),
    "an empty list": ("p.json", b"[]", "holds no prompts; write"),
    "no UTF-8": ("p.txt", b"one\n\xff\xfe", r"is not UTF-8 text: byte 4 \(line 2\) cannot be decoded; save it"),
    "half a line": ("p.jsonl", b'{"prompt": "a"}\n{"prompt"', r"line 2: no JSON \(.*\); .jsonl has one object"),
    "two objects": ("p.jsonl", b'{"prompt": "a"} {"prompt": "b"}', r"line 1: no JSON \(Extra data\); .jsonl has one"),
    "lines in a list": ("p.json", b'{"prompt": "a"}\n{"prompt": "b"}', "p.json, line 2: no JSON .* name it .jsonl"),
    "no object": ("p.jsonl", b"[1]", r"line 1: no JSON object, it has list; write \{"),
    "no object in a list": ("p.json", b'[{"text": "a"}, "b"]', "p.json, entry 2: no JSON object, it has str"),
    "neither": ("p.json", b"3", "p.json: int, not a list of objects; put the prompts into one"),
    "no field": ("p.jsonl", b'{"title": "a"}', r"line 1: no prompt under 'prompt', .*; it has \['title'\]: rename"),
    "a number": ("p.jsonl", b'\n{"prompt": 3}', "line 2: 'prompt' is 3, not a text; write one in quotes"),
    "an empty text": ("p.jsonl", b'{"question": ""}', "'question' is '', not a text; write one in quotes, or"),
    "a table": ("p.jsonl", b'{"question": {"choices": []}}', "'question' is {'choices': \\[\\]}, not a text"),
    "no turn": ("p.jsonl", b'{"turns": []}', r"'turns' is \[\], not a text; write a list of texts, whose first"),
    "turns in one": ("p.jsonl", b'{"turns": "a"}', "'turns' is 'a', not a text; write a list of texts"),
    "a turn that is a table": ("p.jsonl", b'{"turns": [{"role": "user"}]}', "not a text; write a list of texts"),
    "half a character": ("p.jsonl", b'{"prompt": "\\ud800"}', r"line 1: 'prompt' holds '\\ud800', half a character"),
    "brackets": ("p.jsonl", b"[" * 100_000, "line 1: .* .jsonl has one object a line"),
    "digits": ("p.jsonl", b'{"a": ' + b"9" * 5000 + b"}", "line 1: JSON that cannot be read .*digits"),
    "no .gz": ("p.jsonl.gz", b'{"prompt": "a"}', "cannot be read: Not a gzipped file"),
    "half a .gz": ("p.jsonl.gz", gzip.compress(b'{"prompt": "a"}')[:-9], "not a complete .gz: .*; download it again"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD.values(), ids=BAD)
def test_a_bad_file_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as refused:
        read_prompts(tmp_path / name)
    assert str(tmp_path / name) in str(refused.value)


def test_no_such_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no.jsonl' cannot be read: No such file or directory; give text with one"):
        read_prompts(tmp_path / "no.jsonl")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(tmp_path)
