"""Small tokenizers of the kinds in use, trained on a few lines."""

from __future__ import annotations

import json
from functools import lru_cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = [
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park.",
    "def add(left, right):\n    return left + right\n\n\nclass Counter:\n"
    "    def __init__(self):\n        self.count = 0",
    "One day, her mom said: \"Let's go to the park!\" They were very happy. 12 + 30 = 42, and 7 * 6 = 42 too.",
    "for i in range(10):\n    print(i, end=', ')\nx = [1, 2, 3]\ny = {'a': 1, 'b': None}\n",
    "L'été à Zürich: naïve café, 中文字符 测试, привет мир, 🙂 ok 🙂🙃.",
]
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")


def _byte_level(size: int, *, regex: bool, specials: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not regex)
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level]) if regex else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=specials, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def _metaspace(size: int, *, prepend: bool) -> Tokenizer:
    """prepend: by a normalizer and without word borders, as converted Llama vocabularies; else by a pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    space = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.pre_tokenizer = space
    tokenizer.train_from_iterator(LINES[:4], trainers.BpeTrainer(vocab_size=size, show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    tokenizer.model = models.BPE(vocab, [tuple(merge) for merge in model["merges"]], unk_token="<unk>", fuse_unk=True,
                                 byte_fallback=True)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    if prepend:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = None  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def _lower_case_words() -> Tokenizer:
    """WordPiece, which changes the text it encodes."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    specials = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(LINES, trainers.WordPieceTrainer(vocab_size=400, special_tokens=specials,
                                                                  show_progress=False))
    return tokenizer


@lru_cache
def small_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """kind: code and gpt2 (byte-level), llama and metaspace (spaces are marked, bytes are tokens), words (lossy)."""
    if kind == "code":
        made = _byte_level(420, regex=True, specials=["<|pad|>", "<|eos|>", "<|user|>"])
        names = {"eos_token": "<|eos|>"}
    elif kind == "gpt2":
        made = _byte_level(300, regex=False, specials=["<|end|>"])
        names = {"eos_token": "<|end|>", "bos_token": "<|end|>"}
    elif kind in ("llama", "metaspace"):
        made = _metaspace(180, prepend=kind == "llama")
        names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    else:
        made, names = _lower_case_words(), {"unk_token": "[UNK]", "eos_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)
