"""`python -m hotkv_sparse.estimate`."""

import sys

from hotkv_sparse.estimate.command import main

sys.exit(main())
