"""`python -m tools.estimate`."""

import sys

from hotkv_proto.command_line import ended
from tools.estimate.command import main

sys.exit(ended(main))
