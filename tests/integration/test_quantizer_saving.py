"""Does saving a packed model leave what was there intact until all of the new is written, and no rubbish?"""

import errno
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers.modeling_utils
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_mlspec
from hf_mlspec import MLSpecConfig, direct_cast
from hf_mlspec.integration.quantizer import saving
from hf_mlspec.integration.quantizer.folder import quantize_folder
from tests.models import tiny

IDS = torch.arange(3, 17).view(2, 7)
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    tiny("llama", dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(dense):
    return load(dense)


def load(folder, **settings):
    config = MLSpecConfig("int4", group_size=32, **settings)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_second_save_replaces_the_first_whatever_its_shards(model, tmp_path):
    for size in ("1GB", "9KB", "5KB", "1GB"):
        model.save_pretrained(tmp_path, max_shard_size=size)
        shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
        assert ("model.safetensors" in shards) == (size == "1GB") == (len(shards) == 1)
        assert (tmp_path / "model.safetensors.index.json").exists() == (size != "1GB")
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert sorted(contents(tmp_path)) == ["README.md", "config.json", "generation_config.json", "model.safetensors"]


def test_only_weights_of_the_same_variant_are_replaced(model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    model.save_pretrained(tmp_path, variant="a")
    model.save_pretrained(tmp_path, max_shard_size="9KB")
    model.save_pretrained(tmp_path)
    left = sorted(contents(tmp_path))
    assert [name for name in left if "safetensors" in name] == ["model.a.safetensors", "model.safetensors"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_card_is_written_only_where_there_is_none(model, tmp_path):
    model.save_pretrained(tmp_path / "mine")
    card = (tmp_path / "mine" / "README.md").read_text()
    front = ["library_name: transformers", "tags:", "- mlspec", "- int4", "pipeline_tag: text-generation"]
    assert card.splitlines()[:7] == ["---", *front, "---"]
    rows = ("| group size | 32 |", "| bits per packed weight | 4.5 |", "| kept wide | `lm_head` |")
    for words in ("import hf_mlspec", 'from_pretrained("mine")', *rows):
        assert words in card
    assert "base_model" not in card  # quantized from a folder, which means nothing to anyone else
    (tmp_path / "mine" / "README.md").write_text("my words")
    model.save_pretrained(tmp_path / "mine")
    assert (tmp_path / "mine" / "README.md").read_text() == "my words"


def test_the_card_names_a_base_model_from_the_hub(dense, tmp_path):
    model = load(dense)
    model.config.name_or_path = "someone/some-model"
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "base_model: someone/some-model\nbase_model_relation: quantized\n" in card


@pytest.fixture
def earlier(dense, tmp_path):
    """A folder with an earlier save of other weights, and its contents."""
    load(dense, symmetric=False).save_pretrained(tmp_path, max_shard_size="9KB")
    return tmp_path, contents(tmp_path)


def test_a_disk_known_to_be_too_small(model, earlier, monkeypatch):
    folder, before = earlier
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4000))
    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", lambda *args, **kwargs: pytest.fail("written"))
    with pytest.raises(OSError, match=r"needs \d{5,} bytes, 4000 are free \(nothing was written") as raised:
        model.save_pretrained(folder)
    assert raised.value.errno == errno.ENOSPC
    assert contents(folder) == before
    with pytest.raises(OSError, match="4000 are free"):
        model.save_pretrained(folder / "new" / "newer")
    assert not (folder / "new").exists()


@pytest.mark.parametrize("shards_written", [0, 1])
def test_a_disk_that_fills_up(model, earlier, monkeypatch, shards_written):
    folder, before = earlier
    write, written = transformers.modeling_utils.safe_save_file, []

    def full(tensors, filename, metadata=None):
        if len(written) == shards_written:
            open(filename, "wb").close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(filename))
        written.append(filename)
        write(tensors, filename, metadata=metadata)

    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", full)
    with pytest.raises(OSError, match=r"the model needs \d+ bytes, \d+ are free \(writing stopped: .*No space left"):
        model.save_pretrained(folder, max_shard_size="5KB")
    assert len(written) == shards_written
    assert contents(folder) == before
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(folder / "new", max_shard_size="5KB")
    assert not (folder / "new").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits on the size of files are POSIX")
def test_a_real_limit_while_writing(dense, earlier):
    folder, before = earlier
    program = f"""
import resource, sys, hf_mlspec
from transformers import AutoModelForCausalLM
from hf_mlspec import MLSpecConfig
model = AutoModelForCausalLM.from_pretrained({str(dense)!r}, quantization_config=MLSpecConfig("int4", group_size=32))
sys.dont_write_bytecode = True  # or modules imported at exit are left behind cut short, for every later process
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
model.save_pretrained({str(folder)!r})
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert "OSError: [Errno 28] the model needs" in last
    assert "the files that were there are unchanged" in last
    assert contents(folder) == before


@pytest.mark.parametrize("error", [RuntimeError("torn"), KeyboardInterrupt()])
def test_any_other_error_is_its_own_and_changes_nothing(model, earlier, monkeypatch, error):
    folder, before = earlier

    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", fails)
    with pytest.raises(type(error)) as raised:
        model.save_pretrained(folder)
    assert raised.value is error
    assert contents(folder) == before


def test_what_a_killed_save_left_goes_with_the_next(dense, model, earlier):
    folder, before = earlier
    program = f"""
import os, signal, hf_mlspec, transformers.modeling_utils
from transformers import AutoModelForCausalLM
from hf_mlspec import MLSpecConfig
model = AutoModelForCausalLM.from_pretrained({str(dense)!r}, quantization_config=MLSpecConfig("int4", group_size=32))
write = transformers.modeling_utils.safe_save_file
def killed(*args, **kwargs):
    write(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
transformers.modeling_utils.safe_save_file = killed
model.save_pretrained({str(folder)!r})
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == -9
    (left,) = folder.glob(".saving-*")
    assert list(left.glob("*.safetensors"))
    assert files_of(folder) == before
    with saving.staging(folder, 0):  # another save that is still going on
        model.save_pretrained(folder)
        (going_on,) = folder.glob(".saving-*")
        assert going_on != left
    assert sorted(contents(folder)) == ["README.md", "config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize("errno_of_lock", [errno.ENOLCK, errno.EBADF])
def test_a_file_system_without_locks(model, tmp_path, monkeypatch, errno_of_lock):
    def no_lock(descriptor, how):
        raise OSError(errno_of_lock, os.strerror(errno_of_lock))

    monkeypatch.setattr(saving.fcntl, "flock", no_lock)
    (tmp_path / ".saving-unknown").mkdir()
    model.save_pretrained(tmp_path)
    assert (tmp_path / ".saving-unknown").exists()
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


def test_a_file_where_the_folder_should_be(model, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match="this is a file"):
        model.save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "x"


def test_a_model_saves_over_the_files_it_was_read_from(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


def test_what_is_pushed_is_named_after_the_folder(model, tmp_path, monkeypatch):
    pushed = {}

    class Hub:
        def create_repo(self, repo_id, **kwargs):
            pushed["repo"] = repo_id
            return type("Repo", (), {"repo_id": repo_id})

    monkeypatch.setattr(transformers.modeling_utils, "hf_api", Hub, raising=False)
    monkeypatch.setattr(transformers.modeling_utils, "create_repo", Hub().create_repo, raising=False)
    monkeypatch.setattr(PreTrainedModel, "_upload_modified_files",
                        lambda self, folder, repo, *args, **kwargs: pushed.update(files=sorted(os.listdir(folder))))
    model.save_pretrained(tmp_path / "my-model", push_to_hub=True)
    assert pushed["repo"] == "my-model"
    assert {"config.json", "model.safetensors"} <= {*pushed["files"]}


# Who is served, and who is left to transformers.


@pytest.fixture
def enabled_again():
    yield
    hf_mlspec.enable()


def test_enabling_twice_hooks_once_and_disabling_undoes_it(enabled_again):
    hf_mlspec.enable()
    hooked = PreTrainedModel.save_pretrained
    saving.enable()
    assert PreTrainedModel.save_pretrained is hooked
    hf_mlspec.disable()
    assert PreTrainedModel.save_pretrained is hooked.__wrapped__
    hf_mlspec.enable()
    assert PreTrainedModel.save_pretrained.__wrapped__ is hooked.__wrapped__


def test_disabled_beneath_a_wrapper_of_someone_else(model, tmp_path, monkeypatch, enabled_again):
    hooked = PreTrainedModel.save_pretrained
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", lambda self, folder: hooked(self, folder))
    hf_mlspec.disable()
    monkeypatch.setattr(saving, "staging", lambda *args: pytest.fail("staged"))
    model.save_pretrained(tmp_path)
    monkeypatch.undo()
    PreTrainedModel.save_pretrained = hooked.__wrapped__
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


def test_other_models_are_handed_on(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "staging", lambda *args: pytest.fail("staged"))
    tiny("llama").save_pretrained(tmp_path)
    assert not (tmp_path / "README.md").exists()


def test_a_direct_cast_is_saved_the_same_way(dense, tmp_path):
    draft = direct_cast(AutoModelForCausalLM.from_pretrained(dense))
    draft.save_pretrained(tmp_path)
    assert "- mxfp4" in (tmp_path / "README.md").read_text()
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, draft(IDS).logits)


def test_a_folder_whose_config_packs_nothing(tmp_path):
    tiny("llama", seed=3, dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    config = hf_mlspec.MLSpecConfig(format=None, kv_cache="int8")
    found = quantize_folder(str(tmp_path / "plain"), str(tmp_path / "out"), config)
    assert (found.format, found.packed_modules, found.bits_per_packed_weight) == (None, 0, 0.0)
