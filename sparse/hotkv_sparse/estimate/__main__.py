"""`python -m hotkv_sparse.estimate`."""

import sys

from hotkv_proto.command_line import ended
from hotkv_sparse.estimate.command import main

sys.exit(ended(main))
