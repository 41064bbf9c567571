"""How does the demo pair's text become tokens, and the tokens training windows?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, EOS = "<|pad|>", "<|eos|>"
# Words with one leading sign or space, numbers of up to three digits, signs with their line ends, runs of spaces.
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
PROSE_SHARE = 0.3  # of the training windows; of the text it is about a seventh


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE without a normalizer: decode(encode(text)) is the text, byte for byte."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=PAD, eos_token=EOS, bos_token=EOS,
                                   clean_up_tokenization_spaces=False, model_max_length=max_length)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str], seed: int) -> torch.Tensor:
    """One int16 stream ``[tokens]`` of the texts in a random order, an EOS behind each."""
    order = np.random.default_rng(seed).permutation(len(texts))
    parts = []
    for first in range(0, len(order), 1024):
        batch = tokenizer.backend_tokenizer.encode_batch([texts[i] for i in order[first : first + 1024]])
        parts += [np.array([*text.ids, tokenizer.eos_token_id], dtype=np.int16) for text in batch]
    return torch.from_numpy(np.concatenate(parts))


@dataclass(frozen=True)
class Streams:
    """Texts as token streams: int16 ``[tokens]`` on the training device."""

    code: torch.Tensor
    prose: torch.Tensor

    def windows(self, rows: int, length: int) -> torch.Tensor:
        """int64 ``[rows, length]``: random windows, `PROSE_SHARE` of them prose."""
        prose = max(1, round(rows * PROSE_SHARE))
        return torch.cat([windows(self.code, rows - prose, length), windows(self.prose, prose, length)])


def windows(stream: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    starts = torch.randint(len(stream) - length, (rows, 1), device=stream.device)
    return stream[starts + torch.arange(length, device=stream.device)].long()
