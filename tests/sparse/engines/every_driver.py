"""`engine_driver` with the commands of `sparse_driver`."""

import engine_driver
import sparse_driver

__all__ = ["engine_driver", "sparse_driver"]

if __name__ == "__main__":
    engine_driver.main()
