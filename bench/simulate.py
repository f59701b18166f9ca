"""`python -m bench.simulate`: `hotkv-server simulate` for the server's eviction policy and its
rivals."""

import sys
from collections.abc import Sequence

from bench.policies import POLICIES
from hotkv_proto.command_line import Parser, ended
from hotkv_server.simulate import command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m bench.simulate")
    command.add_arguments(parser, POLICIES)
    return command.run(parser.parse_args(arguments), POLICIES)


if __name__ == "__main__":
    sys.exit(ended(main))
