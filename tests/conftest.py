"""What does every test start from: no network, one thread per process, a small saved model with a tokenizer?"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest

# Set before transformers or datasets are imported: a test that reaches for a hub fails at once and says for what.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Small models gain nothing from more threads, and the workers of pytest-xdist would fight for the cores: one thread
# here and in every process that a test starts. Where a test asks for more, they sleep while they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Costs that a call measures are kept for this run of the tests, and are nobody else's.
if "MLSPEC_CACHE" not in os.environ:
    os.environ["MLSPEC_CACHE"] = tempfile.mkdtemp(prefix="mlspec-tests-")
    atexit.register(shutil.rmtree, os.environ["MLSPEC_CACHE"], ignore_errors=True)

import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes first: at the end of a run one worker would compute it alone. Slow tests, then the
    programs of the guide, which share one process of half a minute."""
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, item.path.name != "test_documents.py"))


@pytest.fixture(scope="session", autouse=True)
def fixed_lengths():
    """Levels draft the most they may, as where lengths are given: what a controller does with small random models is
    mostly not to draft. A test with the mark `plans` has the controller."""
    from hf_mlspec.integration import call, known
    from hf_mlspec.integration.stream import chain as stream

    with pytest.MonkeyPatch.context() as patch:
        # What one test knew of a chain is not another's; tests/integration/test_known_files.py has the files.
        patch.setattr(known, "file_of", lambda *_: None)
        patch.setattr(known, "any_known", lambda: False)  # programs that tests run leave some
        for module in (call, stream):
            patch.setattr(module, "let_choose", lambda wiring, levels, settings: wiring.build(levels))
        yield


@pytest.fixture(autouse=True)
def chosen_lengths(request, monkeypatch):
    """The controller, where a test is about it."""
    if "plans" in request.keywords:
        from hf_mlspec.integration import adaptive, call
        from hf_mlspec.integration.stream import chain as stream
        from hf_mlspec.speculation.controller import Controller

        for module in (call, stream):
            monkeypatch.setattr(module, "let_choose", adaptive.let_choose)
        # What one test learned is not another's; tests/integration/test_learned_files.py has the files.
        monkeypatch.setattr(adaptive, "learned_of", lambda *_: None)
        # Costs that a test makes up hold, whatever its rounds take; tests/integration/test_cost_checks.py has others.
        monkeypatch.setattr(Controller, "disproves_costs", False)


@pytest.fixture(autouse=True)
def told_as_before():
    """Log records of every level reach the next test: a program that turns them off turns them on again."""
    yield
    left = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    assert left == logging.NOTSET, f"the test left records up to level {left} turned off"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder of costs, $MLSPEC_CACHE/costs, of this test alone."""
    monkeypatch.setenv("MLSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "costs"


@pytest.fixture
def from_the_root(monkeypatch):
    """The programs of eval/ can be imported; behind them torch has the threads it had."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1]))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory) -> Path:
    """Folder of a random two-layer Llama (96 wide, float32) and a byte-level tokenizer of 258 tokens, `<end>` last."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<pad>", "<end>"])}
    raw = Tokenizer(models.BPE(vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("saved_model")
    PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(vocabulary), hidden_size=96, intermediate_size=192, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                         initializer_range=0.2, bos_token_id=None, pad_token_id=256, eos_token_id=257)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
