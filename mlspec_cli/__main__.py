"""What does `python -m mlspec_cli` do? The same as `mlspec`."""

import sys

from .start import main

sys.exit(main())
