"""Prints what completion offers behind each flag that takes a value, as a JSON object by line. In
a process of its own: argcomplete takes descriptors that others may use."""

import contextlib
import functools
import io
import json
import os
import unittest.mock
from collections.abc import Callable, Iterator

from hotkv_client.command import cli
from hotkv_proto.command_line import Parser, complete_words
from hotkv_server import cli as server_cli


class Ended(BaseException):
    """In place of the program's end."""


def end(status: int) -> None:
    raise Ended


def offered(make_parser: Callable[[], Parser], line: str) -> list[str]:
    output = io.StringIO()
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line}
    asked |= {"COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    with unittest.mock.patch.dict(os.environ, asked), contextlib.suppress(Ended):
        complete_words(make_parser, end=end, output=output)
    return output.getvalue().split()


def lines() -> Iterator[tuple[Callable[[], Parser], str]]:
    """An empty word behind each flag of each command; without flags whose value may be left
    out."""
    server = functools.partial(server_cli.parser_of_all, server_cli.ALL)
    for program, make_parser in (("hotkv", cli.parser), ("hotkv-server", server)):
        for name, parser in make_parser()._parsers().items():
            for action in parser._actions:
                if action.option_strings and action.nargs not in (0, "?"):
                    yield make_parser, f"{program} {name} {action.option_strings[0]} "


if __name__ == "__main__":
    print(json.dumps({line: offered(make_parser, line) for make_parser, line in lines()}))
