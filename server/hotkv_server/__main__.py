"""The command `hotkv-server`. Opens the streams before it loads native code, so that a death
meanwhile leaves stacks."""

import sys

from hotkv_proto.command_line import open_streams


def main() -> int:
    open_streams()
    from hotkv_server import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
