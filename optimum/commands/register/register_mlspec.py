"""How does `optimum-cli mlspec ...` run the mlspec command line? optimum reads this at every start.

No folder above this file may hold an __init__.py: they are optimum's own, as a namespace (PEP 420).
"""

import sys
from argparse import Namespace

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo


class MLSpecCommand(BaseOptimumCLICommand):
    """Hands every word behind `optimum-cli mlspec` to `mlspec`, `--help` too."""

    COMMAND = CommandInfo(name="mlspec", help="Speculative decoding in levels: what mlspec does.")

    @staticmethod
    def parse_args(parser):
        def keep(words, _=None):
            return Namespace(words=list(words), func=parser.get_default("func")), []

        parser.parse_known_args = keep

    def run(self):
        from mlspec_cli import main

        sys.exit(main(self.args.words))


REGISTER_COMMANDS = [MLSpecCommand]
