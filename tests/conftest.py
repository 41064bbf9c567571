"""What does every test start from: no network, one thread per process."""

from __future__ import annotations

import os

# Set before transformers or datasets are imported: a test that reaches for a hub fails at once and says for what.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch

# Small models gain nothing from more threads, and the workers of pytest-xdist would fight for the cores.
torch.set_num_threads(1)
