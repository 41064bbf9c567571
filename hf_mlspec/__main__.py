"""What does `python -m hf_mlspec` do? The same as `mlspec`."""

import sys

from mlspec_cli import main

sys.exit(main())
