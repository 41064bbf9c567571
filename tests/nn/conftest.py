"""Which fixtures do these tests share with one another, and with others?"""

import pytest
import torch
from model_fixtures import ids, tiny_model
from torch import nn

__all__ = ["ids", "tiny_model"]


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 43).to(torch.bfloat16).requires_grad_(False)  # 43: the last tile is short


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
