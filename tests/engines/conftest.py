"""Which fixtures do these tests share with others?"""

from model_fixtures import ids, tiny_model

__all__ = ["ids", "tiny_model"]
