"""Do readers refuse what is malformed in their own words? A few seconds of each, and what was found before."""

from __future__ import annotations

import json
import logging

import pytest
import torch

pytest.importorskip("fastapi", reason="requests are read by the server; pip install 'hf-mlspec[serve]'")
pytest.importorskip("gguf", reason="tests of files write with it")

from eval.plans.tables import PlanError, read_toml
from eval.records.writer import ResultsError, read_results
from eval.report import lines as report_lines
from eval.report.lines import ReportError
from hf_mlspec.batch.lines import BadLine, read_line
from hf_mlspec.batch.source import Source
from hf_mlspec.calibration.finished import FinishedBlocks
from hf_mlspec.checkpoints.awq import AwqReader
from hf_mlspec.checkpoints.gptq import GptqReader
from hf_mlspec.checkpoints.layer import StoredLayer
from hf_mlspec.checkpoints.llama_shape import LlamaShape
from hf_mlspec.checkpoints.pickles import read_pickle
from hf_mlspec.checkpoints.readers import reader_for
from hf_mlspec.engines.memory import bytes_in
from hf_mlspec.evaluation.certificate import Certificate
from hf_mlspec.integration.levels.head_folder import read_head_folder
from hf_mlspec.integration.levels.words import _VIEWS as VIEWS
from hf_mlspec.integration.levels.words import is_head_folder, parse_level
from hf_mlspec.precision import spelled
from hf_mlspec.routing.router import Router
from hf_mlspec.serving.asked import read_asked
from hf_mlspec.serving.chat import _check_messages
from hf_mlspec.serving.errors import ApiError
from hf_mlspec.serving.limits import Limits
from hf_mlspec.serving.server import read_keys
from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.memory import Memory
from hf_mlspec.speculation.traces.file import read_trace
from tests.checkpoints.memory import stored
from tests.checkpoints.rotated_files import CONFIG
from tests.foreign_checkpoints import awq_rows, gptq, rounded
from tests.fuzz import seeds
from tests.fuzz.harness import fuzz
from tests.fuzz.targets import TARGETS

INPUTS = 200  # of each reader: as many on every machine
DEEP = b'{"a":' * 100_000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_malformed_inputs(target, tmp_path):
    logging.disable(logging.CRITICAL)
    try:
        counts = fuzz(target, tmp_path, seed=7, seconds=60, most=INPUTS)
    finally:
        logging.disable(logging.NOTSET)
    assert [f"{one.what}: {one.said} {one.data[:200]!r}" for one in counts.findings.values()] == []
    assert counts.inputs == INPUTS
    assert counts.taken


def test_a_zip_that_lacks_a_byte(tmp_path):
    """Its parts then begin before the file does, of which the system says that no argument of ours is valid."""
    whole = seeds.pickles()[0]
    (tmp_path / "R.bin").write_bytes(whole[:40] + whole[41:])
    with pytest.raises(ValueError, match="is refused"):
        read_pickle(tmp_path / "R.bin")


def test_a_trace_of_a_hundred_thousand_brackets(tmp_path):
    (tmp_path / "trace.json").write_bytes(DEEP)
    with pytest.raises(ValueError, match="not JSON"):
        read_trace(tmp_path / "trace.json")


def test_a_plan_of_a_hundred_thousand_brackets(tmp_path):
    (tmp_path / "plan.toml").write_bytes(b"a = " + b"[" * 100_000)
    with pytest.raises(PlanError, match="is no TOML"):
        read_toml(tmp_path / "plan.toml")


def test_costs_beyond_floats():
    with pytest.raises(ValueError, match="no costs"):
        PassCosts.from_dict(seeds.costs() | {"attention": 10**400})


@pytest.mark.parametrize("url", [["x"], {}, 3])
def test_a_batch_line_whose_url_is_no_text(url):
    with pytest.raises(BadLine, match="url is"):
        read_line(1, json.dumps({"url": url, "body": {"prompt": "x"}}).encode(), 0)


@pytest.mark.parametrize("role", [{}, ["user"]])
def test_a_message_whose_role_is_no_text(role):
    with pytest.raises(ApiError):
        _check_messages([{"role": role, "content": "x"}])


def test_a_bias_of_a_request_beyond_floats():
    with pytest.raises(ApiError, match="logit_bias must be an object of token ids and numbers"):
        read_asked({"prompt": "x", "logit_bias": {"3": 10**400}}, Limits(), {"prompt"}, samples=True)


def test_a_number_of_a_request_beyond_floats():
    with pytest.raises(ApiError):
        read_asked({"prompt": "x", "top_p": 10**400}, Limits(), {"prompt"}, samples=True)


def router_saying(tmp_path, **said):
    router, blocks = seeds.routed()
    router.save(tmp_path / "router.safetensors")
    data = (tmp_path / "router.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    told = json.loads(header["__metadata__"]["mlspec_router"])
    kept = {name: value for name, value in (told | said).items() if value is not None}
    header["__metadata__"]["mlspec_router"] = json.dumps(kept) if "text" not in said else said["text"]
    text = json.dumps(header).encode()
    (tmp_path / "router.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return tmp_path / "router.safetensors", blocks


@pytest.mark.parametrize("said", [
    {"text": "{"}, {"text": "3"}, {"text": DEEP.decode()}, {"widths": None}, {"model": 3}, {"hidden": 2**40},
    {"hidden": True}, {"temperature": True}, {"hidden": 0}, {"temperature": -1.0},
    {"temperature": 10**400}, {"average": None},
])  # fmt: skip
def test_a_router_whose_header_says_nonsense(tmp_path, said):
    """2**40 units would be asked for memory before a tensor is read."""
    path, blocks = router_saying(tmp_path, **said)
    with pytest.raises(ValueError, match="the router is damaged"):
        Router.load(path, blocks)


@pytest.mark.parametrize("change", [(b'"checksums"', b'"ghecksums"'), (b'"report"', b'"veport"'), (b'"[{', b'"[z'),
                                    (b'"{\\"q', b'"i\\"q')])  # fmt: skip
def test_a_finished_block_whose_header_says_nothing_of_it(tmp_path, change):
    work = tmp_path / "work"
    kept = FinishedBlocks(work, seeds.IDENTITY)
    data = seeds.blocks()[0]
    assert change[0] in data
    (work / "block_0000.safetensors").write_bytes(data.replace(*change))
    with pytest.raises(ValueError, match="is damaged"):
        kept.read(0)


@pytest.mark.parametrize("data", [b"", b"0", b'""', b"\xae", b"[", b"[1]", DEEP])
def test_a_calibration_whose_settings_are_damaged(tmp_path, data):
    work = tmp_path / "work"
    FinishedBlocks(work, seeds.IDENTITY)
    (work / "calibration.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"calibration.json is damaged .*: remove"):
        FinishedBlocks(work, seeds.IDENTITY)


@pytest.mark.parametrize("change", [{"architectures": 3}, {"architectures": 0.5}])
def test_a_config_whose_architectures_are_no_list_is_no_heads(tmp_path, change):
    said = {name: value for name, value in json.loads(seeds.heads()[1]).items()} | change
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert not is_head_folder(str(tmp_path))


def test_a_config_of_a_hundred_thousand_brackets_is_no_heads(tmp_path):
    (tmp_path / "config.json").write_bytes(DEEP)
    assert not is_head_folder(str(tmp_path))


def test_a_head_whose_layer_is_a_text(tmp_path):
    said = json.loads(seeds.heads()[0]) | {"transformer_layer_config": ["a layer of two"]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match="lacks or mistakes"):
        read_head_folder(str(tmp_path))


def test_a_word_longer_than_a_path_may_be():
    with pytest.raises(ValueError, match="neither an existing folder nor a known word"):
        parse_level("x" * 5000)


def test_bytes_beyond_floats():
    assert bytes_in("9" * 400) is None
    assert bytes_in("6GiB") == 6 << 30


@pytest.mark.parametrize("size", [[32], "32", 0.5, True])
def test_a_scheme_whose_group_size_is_no_number(size):
    config = json.loads(seeds.quantization_configs()[6])
    config["config_groups"]["group_0"]["weights"]["group_size"] = size
    with pytest.raises(ValueError, match="a scheme with group_size"):
        reader_for(config)


@pytest.mark.parametrize("number", [b"1e999", b"-1e400"])
def test_a_certificate_with_a_number_beyond_floats(tmp_path, number):
    file = tmp_path / "certificate.json"
    file.write_bytes(seeds.certificates()[0].replace(b'"acceptance": 0.5', b'"acceptance": ' + number))
    with pytest.raises(ValueError, match="is beyond what a number can be"):
        Certificate.load(file)


def test_keys_of_a_server_that_are_no_text(tmp_path):
    (tmp_path / "keys").write_bytes(b"\xff\xfea")
    with pytest.raises(ValueError, match="is no UTF-8 text"):
        read_keys(str(tmp_path / "keys"))


def test_a_layer_without_inputs():
    with pytest.raises(ValueError, match=r"q has 0 inputs and 4 outputs in config.json"):
        StoredLayer("q", 0, 4, {})


def test_results_of_a_hundred_thousand_brackets(tmp_path):
    (tmp_path / "results.jsonl").write_bytes(b'{"kind": ' + DEEP + b"\n")
    with pytest.raises(ResultsError, match="line 1: no JSON"):
        read_results(tmp_path / "results.jsonl")
    with pytest.raises(ReportError, match="line 1: no JSON"):
        report_lines.read([tmp_path / "results.jsonl"])


def test_a_table_of_a_batch_whose_column_is_no_text(tmp_path):
    table = seeds.tables()[0]
    assert table.count(b"max_tokens") > 1
    (tmp_path / "lines.parquet").write_bytes(table.replace(b"max_tokens", b"max_toke\xff\xff"))
    with pytest.raises(ValueError, match="is no parquet file"):
        Source(str(tmp_path / "lines.parquet"))


def test_a_model_of_two_billion_layers():
    """The names of all of its norms were made before its first tensor was missed."""
    with pytest.raises(ValueError, match="num_hidden_layers is 2000000000, a positive integer was expected, at most"):
        LlamaShape.of_config(CONFIG | {"num_hidden_layers": 2_000_000_000})


@pytest.mark.parametrize("batch", [float("inf"), 1e400])
def test_what_a_controller_learned_of_infinitely_many_rows(batch):
    said = {"pairs": [], "ratios": [{"rounds": [[0], 4, batch], "counted": [1.0, 2.0]}]}
    with pytest.raises(ValueError, match="nothing that a controller learned"):
        Memory.from_dict(said, 1)


@pytest.mark.parametrize("word", ["w4a" + "9" * 5000, "w" + "4" * 5000, "planes" + "3" * 5000])
def test_a_word_with_thousands_of_digits(word):
    assert spelled(word) is None
    with pytest.raises(ValueError, match="neither an existing folder nor a known word"):
        parse_level(word)


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_with_thousands_of_digits(kind):
    with pytest.raises(ValueError, match=f"{kind} takes a number of"):
        parse_level(f"{kind}:{'9' * 5000}")


def test_scales_and_zero_points_that_were_both_cut_to_one_group():
    """They were read as those of whole rows, though config.json says groups of 32."""
    whole = awq_rows(rounded(torch.randn(16, 64), 4, 32, False))
    cut = gptq(rounded(torch.randn(16, 64), 4, 32, False), 4)
    cut |= {name: cut[name][:1] for name in ("scales", "qzeros")}
    reader = GptqReader({"bits": 4, "group_size": 32})
    with pytest.raises(ValueError, match=r"1 groups: 64 inputs in groups of 32, as config.json has it, are 2"):
        reader.plan(stored(cut, 64, 16))
    assert reader.plan(stored(gptq(rounded(torch.randn(16, 32), 4, 32, False), 4), 32, 16)).format == "int4"
    assert AwqReader({"group_size": 32, "version": "gemv"}).plan(stored(whole, 64, 16)).format == "int4"


@pytest.mark.parametrize("sparsity", [3, ["dense"], {"format": ["x"]}])
def test_a_checkpoint_whose_sparsity_is_no_settings(sparsity):
    config = json.loads(seeds.quantization_configs()[6]) | {"sparsity_config": sparsity}
    with pytest.raises(ValueError, match="this checkpoint is sparse"):
        reader_for(config)


def test_a_result_of_more_tokens_than_floats_hold(tmp_path):
    line = {"kind": "perplexity", "system": "s", "data": "d", "tokens": 3}
    lines = [line, line | {"data": "e", "tokens": 10**400}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    found = report_lines.read([tmp_path / "results.jsonl"])
    assert [one["tokens"] for one in found.records] == [3]
    assert "line 2: a line of kind 'perplexity' that cannot be read (OverflowError" in found.remarks[0]


def test_a_message_whose_tool_calls_are_a_number():
    with pytest.raises(ApiError, match="tool_calls must be a list"):
        _check_messages([{"role": "assistant", "content": "x", "tool_calls": 1e308}])
