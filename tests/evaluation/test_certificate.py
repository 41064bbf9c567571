"""Does a certificate say what was found, of exactly these bytes, and is one that was changed refused?"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from heads import write_head
from mtp_layers import layer_of, target_of, write_mtp
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec.evaluation import Certificate, certify
from hf_mlspec.evaluation import certificate as certificate_module
from hf_mlspec.evaluation.certificate_badge import BEGIN, END
from hf_mlspec.evaluation.certificate_identity import hash_json, hash_parameters
from hf_mlspec.evaluation.certificate_run import attest
from hf_mlspec.integration.levels.load import load_causal_lm
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from tests.models import letters, near, tiny

PROMPTS = ["def area(radius):", "Once upon a time", "x"]


@pytest.fixture(scope="module")
def target(saved_model):
    return load_causal_lm(str(saved_model))


@pytest.fixture(scope="module")
def made(target, saved_model):
    """Of a chain of a cast and a model from a folder, at two batch sizes."""
    return certify(*target, PROMPTS, ["mxfp4", str(saved_model)], max_new_tokens=8, batch_sizes=(1, 2),
                   folder=str(saved_model), prompts_name=str(saved_model / "prompts.txt"))


@pytest.fixture
def folder(saved_model, tmp_path) -> Path:
    return Path(shutil.copytree(saved_model, tmp_path / saved_model.name))


def one_wrong_token(target, **options) -> Certificate:
    """Of a chain held against a target that is said to have written one other id."""
    model, tokenizer = target
    ids = [item.ids for item in hf_mlspec.compare(model, tokenizer, PROMPTS, [], max_new_tokens=6).items]
    ids[1][2] ^= 1
    found = hf_mlspec.compare(model, tokenizer, PROMPTS, ["mxfp4"], max_new_tokens=6, reference_ids=ids)
    return attest(model, tokenizer, PROMPTS, ["mxfp4"], {1: found}, max_new_tokens=6, **options)


def edited(made: Certificate, change, *, new_digest: bool = False) -> dict:
    document = made.to_dict()
    change(document)
    if new_digest:
        document["sha256"] = hash_json({name: value for name, value in document.items() if name != "sha256"})
    return document


def test_what_a_lossless_chain_gets(made):
    told = made.to_dict()
    assert told["result"] == {"lossless": True, "prompts": 3, "identical": 3, "tokens_compared": 48, "mismatches": 0,
                              "tolerated": 0}
    assert made.statement == "lossless: 0 of 48 tokens differ from the target alone over 3 prompts, batch size 1 and 2"
    assert [run["batch_size"] for run in told["runs"]] == [1, 2]
    assert [level["kind"] for level in told["levels"]] == ["cast of the target to mxfp4", "model"]
    assert [level["num_draft_tokens"] for level in told["levels"]] == [None, None]  # left to the call
    assert [level["confidence_threshold"] for level in told["levels"]] == [0.4, 0.4]
    counted = told["runs"][0]["levels"][0]
    assert counted["acceptance"] == round(counted["accepted"] / counted["tested"], 6)
    assert told["settings"]["max_new_tokens"] == 8
    assert told["prompts"]["name"] == "prompts.txt"
    assert told["prompts"]["tokens"] == sum(map(len, PROMPTS))  # a token a byte


def test_weights_have_the_hashes_of_sha256sum(made, saved_model):
    told = made.to_dict()["target"]
    digest = hashlib.sha256((saved_model / "model.safetensors").read_bytes()).hexdigest()
    assert [(entry["name"], entry["sha256"]) for entry in told["weight_files"]] == [("model.safetensors", digest)]
    assert told["weights_sha256"] == hashlib.sha256(f"{digest}  model.safetensors\n".encode()).hexdigest()
    assert [entry["name"] for entry in told["configuration_files"]] == ["config.json", "generation_config.json"]


def test_no_path_and_no_name_of_the_machine_is_told(made, saved_model):
    text = json.dumps(made.to_dict()) + made.markdown()
    for secret in (str(saved_model.parent), os.sep + "hf_mlspec", os.uname().nodename):
        assert secret not in text
    assert re.search(r'"/|~/', text) is None


def test_parameters_of_a_live_model():
    model = tiny(dtype=torch.float32)
    before = hash_parameters(model)
    by_hand = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        by_hand.update(f"{name} float32 {'x'.join(map(str, tensor.shape))}\n".encode() + tensor.numpy().tobytes())
    assert before == by_hand.hexdigest()
    assert hash_parameters(copy.deepcopy(model)) == before
    model.model.norm.weight.data[3] += 1e-3
    assert hash_parameters(model) != before
    assert hash_parameters(tiny(dtype=torch.bfloat16)) != before


def test_packed_parameters_do_not_depend_on_their_layout(saved_model):
    config = hf_mlspec.MLSpecConfig(format="int4", group_size=32)
    model = AutoModelForCausalLM.from_pretrained(saved_model, dtype="bfloat16", quantization_config=config)
    before = hash_parameters(model)
    model(torch.tensor([[1, 2]]))
    assert model.model.layers[0].mlp.up_proj.is_prepacked
    assert hash_parameters(model) == before


def test_one_wrong_token_is_told_with_its_logits(target):
    found = one_wrong_token(target)
    told = found.to_dict()
    assert not found.lossless
    assert told["result"]["mismatches"] == 1
    assert told["result"]["identical"] == 2
    assert found.statement.startswith("NOT lossless: 1 of 15 tokens differ")
    (different,) = told["runs"][0]["differences"]
    assert (different["prompt"], different["position"]) == (1, 2)
    assert different["expected"] == different["got"] ^ 1
    first, second = different["top2_float64"]
    assert different["gap_float64"] == first["logit"] - second["logit"]
    assert different["top2"][0]["token"] == different["got"]
    assert "NOT lossless" in found.markdown()


def test_a_tolerated_tie_is_told_as_one(target):
    found = one_wrong_token(target, tolerate_ties=1e9)
    assert found.lossless
    assert found.to_dict()["result"]["tolerated"] == 1
    assert found.statement.startswith("lossless up to ties: 1 of 15 tokens differ, each between two float64 logits")


def test_a_certificate_is_read_back(made, tmp_path):
    made.save(tmp_path / "c.json")
    again = Certificate.load(tmp_path / "c.json")
    assert again.to_dict() == made.to_dict()
    assert again.markdown() == made.markdown()
    (tmp_path / "c.json").write_text(json.dumps(made.to_dict()), encoding="utf-8")  # other spaces, the same content
    assert Certificate.load(tmp_path / "c.json").statement == made.statement


EDITS = {
    "a mismatch less": lambda d: d["result"].update(mismatches=0, lossless=True, identical=3),
    "other weights": lambda d: d["target"].update(weights_sha256="0" * 64),
    "more tokens": lambda d: d["runs"][0].update(tokens_compared=10**6),
    "a new entry": lambda d: d.update(note="trust me"),
    "no digest": lambda d: d.pop("sha256"),
    "another name": lambda d: d["levels"][0].update(name="mxfp5"),
}


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS)
def test_an_edited_certificate_is_refused(target, tmp_path, change):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(edited(one_wrong_token(target), change)), encoding="utf-8")
    with pytest.raises(ValueError, match=r"c\.json' was changed after it was made"):
        Certificate.load(path)


@pytest.mark.parametrize(("change", "message"), [
    (lambda d: d.pop("runs"), "runs is not there, expected list"),
    (lambda d: d["target"].pop("name"), r"target\.name is not there, expected str"),
    (lambda d: d["runs"][1].update(mismatches="0"), r"runs\[1\]\.mismatches is str, expected int"),
    (lambda d: d["result"].update(mismatches=True), r"result\.mismatches is bool"),
    (lambda d: d["runs"][1].update(mismatches=1), "contradicts itself"),
    (lambda d: d["result"].update(tokens_compared=10**6), "contradicts itself"),
    (lambda d: d["kernels"].pop("sha256"), r"kernels\.sha256 is not there"),
    (lambda d: d["target"].pop("weights_sha256"), r"target\.weights_sha256 is not there"),
    (lambda d: d["prompts"].pop("name"), r"prompts\.name is not there"),
    (lambda d: (d["runs"][0]["differences"].append({"prompt": 0, "position": 1, "tolerated": False}),
                d["result"].update(identical=2)), "contradicts itself"),
    (lambda d: (d["runs"][0]["differences"].append({"prompt": 0, "position": 1, "tolerated": True}),
                d["runs"][0].update(mismatches=1, tolerated=1),
                d["result"].update(identical=2, mismatches=1, tolerated=1)), "contradicts itself"),
    (lambda d: (d["runs"].clear(), d["result"].update(prompts=0, identical=0, tokens_compared=0)),
     "certifies nothing: 2 levels, 0 runs, 0 tokens"),
    (lambda d: d["levels"].clear(), "certifies nothing: 0 levels")])
def test_a_document_with_its_own_digest_that_is_none_is_refused(made, tmp_path, change, message):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(edited(made, change, new_digest=True)), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        Certificate.load(path)


@pytest.mark.parametrize(("text", "message"), [
    ("", "no JSON document"), ("{", "no JSON document"), ("[]", "its schema is None"), ("3", "its schema is None"),
    ('{"schema": "mlspec-trace/1"}', "its schema is 'mlspec-trace/1'"), ("[" * 10**5, "no JSON document"),
    ('{"schema": "mlspec-certificate/1", "x": NaN}', "NaN is not a JSON number"),
    ('{"schema": "mlspec-certificate/1", "result": 1, "result": 2}', "'result' occurs twice")])
def test_another_document_is_refused(tmp_path, text, message):
    (tmp_path / "c.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        Certificate.load(tmp_path / "c.json")


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        Certificate.load(tmp_path / "c.json")
    (tmp_path / "c.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="no JSON document"):
        Certificate.load(tmp_path / "c.json")


@pytest.mark.parametrize(("options", "message"), [
    ({"batch_sizes": ()}, "batch sizes are"), ({"batch_sizes": (1, 1)}, "batch sizes are"),
    ({"batch_sizes": "12"}, "different whole numbers"), ({"batch_sizes": (True,)}, "different whole numbers"),
    ({"batch_sizes": (0,)}, "batch sizes are"), ({"tolerate_ties": 1e-5}, "float32")])
def test_bad_settings_are_refused_before_anything_is_decoded(options, message):
    model = tiny(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        certify(model, None, PROMPTS, ["mxfp4"], **options)


def test_no_levels_are_refused(target):
    with pytest.raises(ValueError, match="no levels to certify"):
        certify(*target, PROMPTS, [])


def test_a_path_object_is_certified_as_the_folder_it_names(target, saved_model):
    as_path, as_text = (
        certify(*target, PROMPTS[:1], [level], max_new_tokens=2).to_dict()["levels"]
        for level in (saved_model, str(saved_model))
    )
    assert as_path == as_text
    assert as_path[0]["weight_files"]


def test_what_decoded_is_told(target, made):
    how = made.to_dict()["target"]["decoding"]
    assert how == ({"how": "compiled decoder", "reason": None} if has_compiled_decoder() else
                   {"how": "module by module", "reason": "no compiled kernels"})
    options = {"max_new_tokens": 2, "speculation_config": {"prepare": False, "num_draft_tokens": [3, 2]}}
    told = certify(*target, PROMPTS[:1], ["mxfp4", "ngram"], **options).to_dict()
    assert told["target"]["decoding"] == {"how": "module by module", "reason": "prepare=False"}
    assert [(level["kind"], level["num_draft_tokens"]) for level in told["levels"]] == [
        ("cast of the target to mxfp4", 3), ("lookup", 2)]
    assert "parameters_sha256" not in told["levels"][1]


@pytest.mark.skipif(not has_compiled_decoder(), reason="without kernels everything runs module by module")
def test_what_levels_saw_is_told(target):
    options = {"draft_window": 30, "draft_cache": "int8", "num_draft_tokens": 2}
    found = certify(*target, PROMPTS[:1], ["mxfp4", near(target[0], 0.1), "ngram"], max_new_tokens=2,
                    speculation_config=options)
    told = found.to_dict()["levels"]
    assert [(level.get("draft_window"), level.get("draft_cache")) for level in told] == [
        (30, None), (30, "int8"), (None, None)]
    assert "draft window 30, int8 cache" in found.markdown()
    left_to_the_call = certify(*target, PROMPTS[:1], ["mxfp4"], max_new_tokens=2)
    assert left_to_the_call.to_dict()["levels"][0]["draft_window"] is None
    assert "draft window" not in left_to_the_call.markdown()


@pytest.mark.skipif(not has_compiled_decoder(), reason="without kernels everything runs module by module")
def test_the_reason_of_an_unknown_class_is_told(target):
    _, tokenizer = target
    told = certify(tiny("diffllama", dtype=torch.float32, vocab_size=258), tokenizer, ["x"], ["prompt_lookup"],
                   max_new_tokens=2).to_dict()
    assert told["target"]["decoding"]["reason"] == "the compiled decoder does not know this class"


def test_one_4_bit_model_that_drafts_for_itself(saved_model, target):
    config = hf_mlspec.MLSpecConfig(format="int4", group_size=32)
    model = AutoModelForCausalLM.from_pretrained(saved_model, dtype="bfloat16", quantization_config=config).eval()
    found = certify(model, target[1], PROMPTS, ["qspec"], max_new_tokens=6, batch_sizes=(1, 3))
    told = found.to_dict()
    assert told["target"]["format"]["format"] == "int4"
    assert told["target"]["format"]["activation_bits"] == 16
    assert told["levels"][0]["activation_bits"] == 8
    assert told["levels"][0]["kind"] == "the target at a lower precision"
    assert told["levels"][0]["parameters_sha256"] == told["target"]["parameters_sha256"]
    assert told["settings"]["dtype"] == "bfloat16"
    if has_compiled_decoder():
        assert found.lossless


def test_check_finds_the_same(made, folder, saved_model):
    found = made.check(str(folder), prompts=PROMPTS)
    assert found
    assert found.unchecked == [f"level {saved_model.name}"]
    whole = made.check(str(folder), [str(folder)], PROMPTS)
    assert whole
    assert whole.unchecked == []
    assert len(whole.same) == 8


def test_check_finds_another_tokenizer(made, folder, target):
    tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
    vocabulary = json.loads(tokenizer)
    names = vocabulary["model"]["vocab"]
    names["d"], names["x"] = names["x"], names["d"]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (line,) = made.check(str(folder), prompts=PROMPTS).different
    assert line.startswith("token ids of the prompts (tokenizer): ")
    assert "tokenizer" in made.check(target[0], prompts=PROMPTS).unchecked


def flip(folder: Path, name: str = "model.safetensors") -> None:
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)


@pytest.mark.parametrize(("change", "message"), [
    (flip, "target: weights, 1 file: "), (lambda folder: flip(folder, "config.json"), "target: configuration files: "),
    (lambda folder: shutil.copy(folder / "model.safetensors", folder / "more.safetensors"), "weights, 2 files: ")])
def test_check_finds_another_model(made, folder, change, message):
    change(folder)
    found = made.check(str(folder))
    assert not found
    (line,) = found.different
    assert message in line


def test_check_finds_other_prompts_levels_and_kernels(made, folder, monkeypatch):
    assert not made.check(str(folder), prompts=[*PROMPTS[:2], "y"])
    flip(folder)
    found = made.check(str(folder), [str(folder)])
    assert [line.split(":")[0] for line in found.different] == ["target", f"level {folder.name}"]
    monkeypatch.setattr(certificate_module, "kernels", lambda device: {
        "library": "_C.so", "sha256": "0" * 64, "instruction_set": "generic", "ops": {}})
    assert [line.split(":")[0] for line in made.check(str(folder)).different] == ["target", "kernels",
                                                                                 "instruction set"]


def test_check_of_a_live_model(target):
    model, tokenizer = target
    found = certify(model, tokenizer, PROMPTS[:1], ["prompt_lookup"], max_new_tokens=2)
    assert found.check(model)
    assert found.check(model.config.name_or_path)  # loads it: there were no files to compare
    other = copy.deepcopy(model)
    other.model.norm.weight.data[0] += 1
    assert [line.split(":")[1] for line in found.check(other).different] == [" parameters"]


@pytest.mark.parametrize(("model", "levels", "message"), [
    ("./nowhere", [], "'./nowhere' does not exist"), (None, ["./other"], "no level other besides its own: mxfp4")])
def test_check_of_what_is_not_there_is_refused(made, folder, model, levels, message):
    with pytest.raises(ValueError, match=message):
        made.check(model or str(folder), levels)


OTHER = "0 < 1 | \u00e9\u4e16 <!-- a comment --> "


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(("before", "after"), [
    ("", ""), ("# Card\n\ntext\n", ""), ("# Card", ""), ("", "\nmore\n"), (OTHER + "\n", "\n" + OTHER),
    ("\ufeff---\ntags: a\n---\n", "\n\n\ntail without an end"), (f"Use {BEGIN} and {END}.\n", "\n")])
def test_a_badge_replaces_itself_and_touches_nothing_else(made, tmp_path, before, after, newline):
    card = tmp_path / "README.md"
    before, after = before.replace("\n", newline), after.replace("\n", newline)
    block = f"{BEGIN}{newline}old{newline}{END}" if after else ""
    card.write_bytes((before + block + after).encode())
    made.save_badge(card)
    once = card.read_bytes()
    text = once.decode()
    assert text.startswith(before)
    assert text.endswith(after)
    assert text.count(made.statement.replace("_", r"\_")) == 1
    assert "old" not in text.removeprefix(before)
    assert newline not in before + after or text.count("\n") == text.count(newline)
    made.save_badge(card)
    assert card.read_bytes() == once


def refused_and_kept(save, path, text, said):
    """`save` does not overwrite a file that holds `text`."""
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        save(path)
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("text", [f"{BEGIN}\n", f"{END}\n", f"{END}\n{BEGIN}\n",
                                  f"{BEGIN}\nx\n{END}\n{BEGIN}\ny\n{END}\n"])
def test_a_card_with_half_a_block_is_refused_and_kept(made, tmp_path, text):
    refused_and_kept(made.save_badge, tmp_path / "README.md", text, r"README\.md' holds \d lines")


def test_other_cards_are_refused(made, tmp_path):
    (tmp_path / "b.md").write_bytes(b"ab\xff")
    for path, message in ((tmp_path / "b.md", "byte 2"), (tmp_path, "is a folder"),
                          (tmp_path / "no" / "b.md", "that folder does not exist")):
        with pytest.raises(ValueError, match=message):
            made.save_badge(path)
    with pytest.raises(ValueError, match="that folder does not exist"):
        made.save(tmp_path / "no" / "c.json")


def test_links_and_modes_of_files_stay(made, tmp_path):
    card, link = tmp_path / "card.md", tmp_path / "README.md"
    card.write_text("text\n", encoding="utf-8")
    card.chmod(0o640)
    link.symlink_to(card)
    made.save_badge(link)
    assert link.is_symlink()
    assert BEGIN in card.read_text(encoding="utf-8")
    assert card.stat().st_mode & 0o777 == 0o640


def test_a_failing_write_leaves_the_earlier_file(made, tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    made.save(path)
    earlier = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        made.save(path)
    assert path.read_bytes() == earlier
    assert os.listdir(tmp_path) == ["c.json"]


@pytest.mark.parametrize("content", ["weights", '{"schema": "mlspec-trace/1"}', ""])
def test_only_a_certificate_is_overwritten(made, tmp_path, content):
    said = r"model\.safetensors' exists and is not a certificate"
    refused_and_kept(made.save, tmp_path / "model.safetensors", content, said)


def test_two_levels_of_one_name_are_told_apart(target, tmp_path, saved_model):
    upper, lower = (Path(shutil.copytree(saved_model, tmp_path / place / "model")) for place in ("a", "b"))
    flip(lower)
    levels = [str(upper), str(lower)]
    found = certify(*target, PROMPTS[:1], levels, max_new_tokens=2, folder=str(saved_model))
    whole = found.check(str(saved_model), levels)
    assert whole
    assert len(whole.same) == 8
    assert len(found.check(str(saved_model), levels[::-1]).different) == 2
    with pytest.raises(ValueError, match="no level model besides its own: model, model"):
        found.check(str(saved_model), [*levels, str(upper)])


def test_names_cannot_break_the_table(made):
    def rename(document):
        document["target"]["name"] = "a|b\n<!-- x --> `c` [d](e)"

    document = edited(made, rename)
    document.pop("sha256")
    line = next(line for line in Certificate(document).markdown().splitlines() if line.startswith("| target"))
    assert r"a\|b \<!-- x --\> \`c\` \[d\](e)" in line


@pytest.mark.parametrize("word", ["{}", "mtp", "mtp:{}"])
def test_a_chain_that_ends_in_a_head(word, tmp_path):
    """Its files are hashed where it has a folder of its own; an MTP layer of the target's is among the target's."""
    if "mtp" in word:
        model = target_of("Glm4MoeForCausalLM", torch.bfloat16)
        head = write_mtp(tmp_path / "head", model, layer_of(model))
    else:
        model = tiny(dtype=torch.bfloat16)
        head = write_head(tmp_path / "head", model)
    model.save_pretrained(tmp_path / "target")
    level = word.format(head)
    found = certify(model, letters(), ["ab", "cd"], [level], max_new_tokens=4, folder=str(tmp_path / "target"),
                    speculation_config={"num_draft_tokens": 2})
    told, = found.to_dict()["levels"]
    own = word == "mtp"
    assert told["kind"] == ("MTP layer of the target's checkpoint" if own else "trained head")
    assert told["decoding"] == {"how": "module by module", "reason": "a head"}
    assert (told["weights_sha256"] is None) == own
    assert not found.check(str(tmp_path / "target"), [level]).different
    if not own:
        assert "level head" in found.check(str(tmp_path / "target")).unchecked
        (head / "more.safetensors").write_bytes(b"")
        assert any("level head: weights" in one for one in found.check(str(tmp_path / "target"), [level]).different)
