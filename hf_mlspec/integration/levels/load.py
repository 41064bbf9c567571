"""How is a model loaded from a folder, and which errors does a wrong folder give?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import nn

from ...checkpoints.gguf_file import open_gguf
from ...nn.replace import direct_cast
from ..quantizer.checkpoint import require_own_shards
from ..quantizer.gguf_loading import load_gguf
from ..quantizer.gpt_oss_loading import is_original_folder, load_original
from ..quantizer.source_config import is_gguf, loading_options
from .hub import why_not_on_hub
from .words import is_hub_name, require_no_head

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of tokenizers -> of GGUF files
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
# Of from_pretrained, for what is no checkpoint; RuntimeError: weights that cannot be converted.
LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)


def load_causal_lm(path: str, dtype: str = "float32", device: str = "cpu") -> tuple[Any, Any]:
    """The model (on `device`, in `dtype`, ready to generate) and the tokenizer of one folder or hub name.

    Raises ValueError, in one line, for a folder that is not there or holds no causal language model and tokenizer.
    """
    model = read_model(path, _dtype_for(path, dtype))
    return model.to(device).eval(), read_tokenizer(path)


def load_shared_lm(path: str, dtype: str, processes: int, device: str) -> tuple[Any, Any]:
    """The same of a model that so many processes share by tensor parallelism: each of them has to call this, with its
    place in torch's process group. device: "cpu" or "cuda", where each has a GPU of its own."""
    whole = _dtype_for(path, dtype)
    from transformers.distributed import DistributedConfig

    shared = DistributedConfig(tp_plan="auto", tp_size=processes)
    model = read_model(path, whole, distributed_config=shared)
    if model.device.type != device:
        raise ValueError(f"{processes} processes share {path!r} on {model.device}, and {device!r} was asked for")
    return model.eval(), read_tokenizer(path)


def _dtype_for(path: str, dtype: str) -> torch.dtype:
    """That of a word; ValueError for another one, and for a folder that is not there."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    require_folder(path)
    return DTYPES[dtype]


def require_device(device: str) -> None:
    """ValueError for one that this process cannot use."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error


def require_folder(path: str) -> None:
    """ValueError where ``path`` can only be a folder and there is none; a GGUF file passes."""
    if is_gguf(path):
        return
    if not is_hub_name(path) and not Path(path).is_dir():
        raise ValueError(f"model folder {path!r} does not exist; give a folder written by save_pretrained")


def require_config(path: str, name: str) -> None:
    """ValueError, which calls the model `name`, for a folder that holds none, or a hub name nobody knows of."""
    _require_known(path, name)
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ValueError(f"{name} cannot be loaded as a causal language model: the folder holds no config.json")


def _require_known(path: str, name: str, revision: str | None = None) -> None:
    """ValueError, which calls the model `name`, for a hub name of which nothing can be known."""
    why = None if Path(path).exists() or not is_hub_name(path) else why_not_on_hub(path, revision)
    if why is not None:
        raise ValueError(f"{name} cannot be loaded as a causal language model: {why}")


def read_model(path: str, dtype: torch.dtype | str, **options: Any) -> transformers.PreTrainedModel:
    """The causal language model of a folder or hub name, on the CPU, loaded with these options of from_pretrained.
    ValueError, in one line, where there is none."""
    _require_known(path, repr(path), options.get("revision"))
    require_own_shards(path)
    require_no_head(path)
    try:
        if is_gguf(path):
            return load_gguf(path, dtype=dtype, **options)
        if is_original_folder(path):
            return load_original(path, dtype=dtype, **options)
        options = loading_options(path, options) | options
        # Without ignore_mismatched_sizes transformers stops too, but its error names neither weight nor shape.
        with _one_bar(packing="quantization_config" in options):
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True, **options
            )
    except LOAD_ERRORS as error:
        said = _damaged(path) if isinstance(error, SafetensorError) else None
        raise ValueError(
            f"{path!r} cannot be loaded as a causal language model: {said or first_line(error)}"
        ) from error
    if found["mismatched_keys"]:
        name, stored, expected = min(found["mismatched_keys"])
        raise ValueError(
            f"the weights in {path!r} do not fit its config.json: {name} is {list(stored)} there and {list(expected)} "
            f"by the config ({len(found['mismatched_keys'])} weights differ); restore the config.json they came with"
        )
    return model


def _damaged(folder: str) -> str | None:
    """Which of a folder's files is no whole safetensors file; None where all are."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            size = f"{file.stat().st_size:,} bytes"
            return f"{file.name} ({size}) is damaged or not whole ({first_line(error)}); copy or download it again"
    return None


def read_tokenizer(path: str, **options: Any) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of a folder, hub name or GGUF file, loaded with these options of from_pretrained. ValueError, in
    one line, where there is none that can be read."""
    place = path
    if is_gguf(path):
        place, options = str(Path(path).parent), {"gguf_file": Path(path).name, **options}
    try:
        found = transformers.AutoTokenizer.from_pretrained(place, **options)
        return _as_the_file_says(found, path) if is_gguf(path) else found
    except Exception as error:  # the tokenizers library raises bare Exceptions for a file it cannot parse
        said = f"{path!r} holds no tokenizer that can be read: {first_line(error)}; restore its files"
        raise ValueError(said) from error


def _as_the_file_says(
    tokenizer: transformers.PreTrainedTokenizerBase, file: str
) -> transformers.PreTrainedTokenizerBase:
    """A GGUF file's tokenizer, without the tokens that transformers adds behind those of the file, such as
    "<|endoftext|>", for which a model has no rows; and with the file's special tokens, which 5.17 mixes up."""
    told = open_gguf(file).metadata
    tokens = told["tokenizer.ggml.tokens"]
    numbers = {name: told.get(f"tokenizer.ggml.{word}_token_id") for name, word in _SPECIAL.items()}
    names = {name: tokens[n] for name, n in numbers.items() if n is not None and n < len(tokens)}
    alike = all(tokenizer.special_tokens_map.get(name) == token for name, token in names.items())
    if not tokenizer.is_fast or (alike and len(tokenizer) <= len(tokens)):
        return tokenizer
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    stored["added_tokens"] = [token for token in stored["added_tokens"] if token["id"] < len(tokens)]
    kept = ("chat_template", "model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(stored)),
        **names,
        **{name: getattr(tokenizer, name) for name in kept},
    )


def first_line(error: Exception) -> str:
    """The first line of an error, without the lists that transformers appends; its type if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def hide_progress_bars() -> None:
    """Keep transformers' loading bars out of a program's own output."""
    transformers.utils.logging.disable_progress_bar()


@contextmanager
def _one_bar(packing: bool) -> Iterator[None]:
    """Where weights are packed while they load, our bar counts them: transformers' own stays away."""

    def choose(bar: Callable[..., Any], words: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return bar(*words, **options | ({"disable": True} if options.get("desc") == "Loading weights" else {}))

    if not packing:
        yield
        return
    before = transformers.utils.logging.set_tqdm_hook(choose)
    try:
        yield
    finally:
        transformers.utils.logging.set_tqdm_hook(before)


def load_level(target: nn.Module, path: str, cast: dict | None):
    """A model from a folder, in the target's dtype and on its device, with the tokenizer of the same folder.

    cast: applies `direct_cast` to it; None leaves it as it is.
    """
    try:
        model = read_model(path, target.dtype)
    except ValueError as error:
        said = str(error)
        raise ValueError(f"level {said}" if said.startswith(repr(path)) else f"level {path!r}: {said}") from error
    tokenizer = _load_tokenizer(path)
    model = model.to(next(target.parameters()).device).eval()
    return (direct_cast(model, **cast) if cast else model), tokenizer


def _load_tokenizer(path: str):
    """The tokenizer beside a model, or None: then the sizes of the vocabularies decide, or the user is asked."""
    folder = Path(path)
    if folder.is_dir():
        # Without files, some tokenizer classes come back empty instead of failing.
        there = any(folder.glob("tokenizer*")) or any(folder.glob("vocab*"))
        return read_tokenizer(path) if there else None
    try:
        return read_tokenizer(path)
    except ValueError:  # a hub name, whose files cannot be listed, or a GGUF file: without a tokenizer a fine level
        return None
