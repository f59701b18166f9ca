"""`python -m hotkv_server` is `hotkv-server`."""

import sys

from hotkv_server.cli import main

sys.exit(main())
