"""How does a packed model get to disk so that, whatever goes wrong, the files that were there before survive?"""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from transformers import PreTrainedModel

try:
    import fcntl
except ImportError:  # only POSIX has it
    fcntl = None

from ..request import router_of
from ..routed import ROUTER_FILE
from .model_card import model_card
from .quantizer import MLSpecQuantizer

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_WORDS = re.compile(r"No space left|quota exceeded|File too large|os error (28|122|27)\b", re.IGNORECASE)
_BESIDE_WEIGHTS, _BESIDE_TENSOR = 1 << 16, 1 << 9  # bytes: config, generation config and card; names in the headers
_STAGED = ".saving-"  # begins the names of the folders that saves write to, each locked while its save lives
_hooked: Callable | None = None  # what stands at PreTrainedModel.save_pretrained, while enabled


def enable() -> None:
    """Let save_pretrained of packed models write aside and rename. Done by `import hf_mlspec`; idempotent.

    Models of another kind are handed to transformers unseen.
    """
    global _hooked
    if _hooked is None:
        _hooked = _staged_save(PreTrainedModel.save_pretrained)
        PreTrainedModel.save_pretrained = _hooked


def disable() -> None:
    """Give transformers its own save_pretrained back; beneath a wrapper of someone else, one that hands all on."""
    global _hooked
    if _hooked is not None and PreTrainedModel.save_pretrained is _hooked:
        PreTrainedModel.save_pretrained = _hooked.__wrapped__
    _hooked = None


def _staged_save(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def save_pretrained(self, save_directory, *args, **kwargs):
        quantizer = getattr(self, "hf_quantizer", None)
        ours = isinstance(quantizer, MLSpecQuantizer) and quantizer.quantization_config.record is not None
        if not ours or _hooked is not save_pretrained or kwargs.get("distributed_checkpoint"):
            return stock(self, save_directory, *args, **kwargs)
        folder = Path(save_directory)
        if kwargs.get("push_to_hub") or (len(args) > 2 and args[2]):
            kwargs.setdefault("repo_id", folder.absolute().name)  # stock would name it after the folder it writes to
        with staging(folder, _bytes_needed(self)) as staged:
            result = stock(self, staged, *args, **kwargs)
            if quantizer.router is not None and (staged / "config.json").exists():
                quantizer.router.save(staged / ROUTER_FILE)
            if (staged / "config.json").exists() and not (folder / "README.md").exists():  # other ranks write nothing
                (staged / "README.md").write_text(model_card(self, folder.absolute().name), encoding="utf-8")
        return result

    return save_pretrained


def _bytes_needed(model: PreTrainedModel) -> int:
    router = router_of(model)
    own = () if router is None else router.state_dict().values()
    return bytes_needed((*model.parameters(), *model.buffers(), *own))


def bytes_needed(tensors: Iterable[torch.Tensor]) -> int:
    """What a save of these tensors takes, each once, with headers, config and card."""
    held = {id(tensor): tensor.nbytes for tensor in tensors}
    return sum(held.values()) + _BESIDE_TENSOR * len(held) + _BESIDE_WEIGHTS


@contextmanager
def staging(folder: Path, needed: int) -> Iterator[Path]:
    """A new folder inside ``folder``, and so on its file system; at the end its files take their places there.

    An error leaves ``folder`` as it was; what a killed process left there goes with the next save. OSError with the
    bytes needed and free where the disk is full, before or while writing; NotADirectoryError where ``folder`` is a
    file.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a model is saved into a folder, this is a file", str(folder))
    if folder.exists():
        _remove_abandoned(folder)
    free = shutil.disk_usage(next(f for f in (folder, *folder.absolute().parents) if f.exists())).free
    if free < needed:
        raise _no_space(folder, needed, free, None)
    created = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    held = ExitStack()
    with _locked(folder):
        staged = Path(tempfile.mkdtemp(prefix=_STAGED, dir=folder))
        held.enter_context(_locked(staged))
    try:
        yield staged
        _flush(staged)
        with _locked(folder):  # else the files of two saves could mix
            _take_places(staged, folder)
    except Exception as error:
        if not _is_full(error):
            raise
        free = shutil.disk_usage(folder).free + sum(f.stat().st_size for f in staged.rglob("*") if f.is_file())
        raise _no_space(folder, needed, free, error) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        held.close()
        if created and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def _locked(folder: Path, wait: bool = True) -> Iterator[bool]:
    """Whether the folder's advisory lock, which ends with the process, could be had.

    Where nothing locks folders (some network file systems) saves go on, and leave what a killed process left.
    """
    if fcntl is None:
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _lock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        return False
    return True


def _remove_abandoned(folder: Path) -> None:
    with _locked(folder):
        for staged in folder.glob(f"{_STAGED}*"):
            with suppress(FileNotFoundError), _locked(staged, wait=False) as abandoned:
                if abandoned:
                    shutil.rmtree(staged, ignore_errors=True)


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return bool(_FULL_WORDS.search(str(error)))  # safetensors' own error carries the words only


def _no_space(folder: Path, needed: int, free: int, error: Exception | None) -> OSError:
    when = "nothing was written" if error is None else f"writing stopped: {' '.join(str(error).split())}"
    return OSError(
        errno.ENOSPC,
        f"the model needs {needed} bytes, {free} are free ({when}; the files that were there are unchanged): make "
        "room, or save to another disk",
        str(folder),
    )


def _flush(staged: Path) -> None:
    """On disk before the first rename: some file systems find out only then that they are full."""
    for file in staged.iterdir():
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _take_places(staged: Path, folder: Path) -> None:
    # Weights first, config.json last: a load in between sees weights that do not fit, not a half model.
    new = sorted(staged.iterdir(), key=lambda file: (file.name == "config.json", ".safetensors" not in file.name))
    before, placed = Path(tempfile.mkdtemp(prefix="before-", dir=staged)), []
    try:
        for file in new:
            was_there = _keep(folder / file.name, before)
            os.replace(file, folder / file.name)
            placed.append((file.name, was_there))
    except BaseException:
        for name, was_there in reversed(placed):
            _put_back(folder / name, before / name, was_there)
        raise
    _remove_stale({file.name for file in new}, folder)


def _keep(file: Path, before: Path) -> bool:
    """Give a file that is about to be replaced a second name; whether there is one. Where a file system has no second
    names, there is no way back."""
    if not file.exists():
        return False
    with suppress(OSError):
        os.link(file, before / file.name)
    return True


def _put_back(file: Path, kept: Path, was_there: bool) -> None:
    with suppress(OSError):
        if kept.exists():
            os.replace(kept, file)
        elif not was_there:
            file.unlink()


def _remove_stale(new: set[str], folder: Path) -> None:
    """Remove weights of an earlier save that the new ones replace under other names (single file or shards): loading
    would prefer them, or find them twice."""
    bases = {re.sub(r"-\d{5}-of-\d{5}", "", name) for name in new if name.endswith(".safetensors")}
    for base in bases:
        variant = re.escape(base.removeprefix("model").removesuffix(".safetensors"))
        index = rf"model\.safetensors\.index{variant}\.json"
        earlier = re.compile(rf"model{variant}(-\d{{5}}-of-\d{{5}})?\.safetensors|{index}")
        for file in folder.iterdir():
            if earlier.fullmatch(file.name) and file.name not in new:
                file.unlink()
