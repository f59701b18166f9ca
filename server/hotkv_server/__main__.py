"""Lets `python -m hotkv_server` run the command `hotkv-server`."""

import sys

from hotkv_server.cli import main

sys.exit(main())
