"""What do the tests of eval/ start from, beside what all tests do?"""

from __future__ import annotations

import pytest


@pytest.fixture
def toy(tmp_path, from_the_root):
    """Folder with a plan of eval.quality and its data."""
    from quality_toy import lay_out

    lay_out(tmp_path)
    return tmp_path
