"""How does a test read the one line with which a command refuses?"""

from __future__ import annotations

from hf_mlspec.cli import main


def refusal(capsys, *argv: object) -> str:
    """The one line on stderr of a command that exits with 2."""
    try:
        status = main([str(word) for word in argv])
    except SystemExit as end:  # argparse
        status = end.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err
