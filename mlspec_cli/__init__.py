# PYTHON_ARGCOMPLETE_OK
"""What can be typed after `mlspec`? The command line up to the moment a command runs.

Nothing heavy is imported before: `hf_mlspec`, whose import brings torch and transformers, comes when a command is to
run, and hf_mlspec/cli is what it does.
"""

from .start import main

__all__ = ["main"]
