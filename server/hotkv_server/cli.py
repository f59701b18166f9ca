"""`hotkv-server`: run the server, or check its configuration."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import hotkv

try:
    from hotkv_server.settings import Settings, load_settings, print_error
except ImportError as missing:
    sys.exit(f"hotkv-server: {missing.name} is not installed: the server needs its extra, pip install 'hotkv[server]'")

USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 where it could not start, 2 for bad settings."""
    parser = argparse.ArgumentParser(
        prog="hotkv-server",
        description="KV cache server for vLLM.",
        epilog="Every other flag is a setting: `hotkv-server run --help-settings` lists them.",
    )
    parser.add_argument("--version", action="version", version=f"hotkv-server {hotkv.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the server", add_help=True)
    run.add_argument("--config", type=Path, help="TOML file with settings")
    run.add_argument("--check", action="store_true", help="check the settings, print them as JSON, and exit")
    run.add_argument("--help-settings", action="store_true", help="list all settings and exit")
    known, flags = parser.parse_known_args(arguments)
    try:
        settings = load_settings(known.config, ["--help"] if known.help_settings else flags, "hotkv-server run")
    except ValueError as error:
        print_error(str(error))
        return USAGE_ERROR
    if known.check:
        print(settings.model_dump_json(indent=2, by_alias=True))
        return 0
    return _run(settings)


def _run(settings: Settings) -> int:
    from hotkv_server.daemon import StartError, serve

    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        import uvloop

        uvloop.run(serve(settings))
    except ImportError:
        asyncio.run(serve(settings))
    except StartError as error:
        print_error(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
