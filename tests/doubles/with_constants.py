"""`python -m tests.doubles.with_constants ARGUMENTS`: hotkv-server, of which each `--constant
MODULE.NAME=VALUE` replaces a constant; VALUE is a Python expression that may use the module's
names.

Helpers of tests that take the server's flags take this one too; other programs give `COMMAND`.
"""

import importlib
import sys
from collections.abc import Sequence

from hotkv_server import cli

MODULE = "tests.doubles.with_constants"
FLAG = "--constant"
COMMAND = (sys.executable, "-m", MODULE, "run")


def constant(name: str, value: object) -> tuple[str, str]:
    """Flags. `name`: in the package `hotkv_server`."""
    return FLAG, f"hotkv_server.{name}={value}"


def copies_by(method: str) -> tuple[str, str]:
    """Flags. `auto`: a measurement chooses."""
    chosen = "" if method == "auto" else f"Method({method!r})"
    return constant("device.start.COPIES", f"CudaCopySettings({chosen})")


def cores(**values: float) -> tuple[str, str]:
    """Flags: fields of `CoreConfig`."""
    made = f"__import__('functools').partial(CoreConfig, **{values})"
    return constant("startup.cache.CoreConfig", made)


def applied(command: Sequence[str]) -> list[str]:
    """A command of `hotkv-server` that may have FLAG."""
    is_server = command[1] == "-m" and command[2].startswith("hotkv_server")
    return [*command[:2], MODULE, *command[3:]] if is_server and FLAG in command else [*command]


def run(arguments: Sequence[str]) -> int:
    """In place of `cli.main`."""
    left = list(arguments)
    while FLAG in left:
        place = left.index(FLAG)
        name, _, value = left[place + 1].partition("=")
        path, _, attribute = name.rpartition(".")
        module = importlib.import_module(path)
        assert hasattr(module, attribute), name
        setattr(module, attribute, eval(value, vars(module).copy()))
        del left[place : place + 2]
    return cli.main(left)


def main() -> int:
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
