"""Finds long English texts on the system, and makes a copy text of one.

Licences (GPL-3 and LGPL-3, of Debian), vim's manual, and prose (Newton's Opticks, in
libbacktrace's test data inside packages that vLLM needs, and in Go). The copy text, `repeat`,
ends with a quotation of its own tokens from far back, which a model must find to go on.
"""

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LICENCES = Path("/usr/share/common-licenses")
OPTICKS = "Isaac.Newton-Opticks.txt"
REPEAT = "repeat"
QUOTED_FROM_RATIO = 0.25
"""Where the quoted tokens begin, of the text's length."""


def add_model(flags: argparse.ArgumentParser) -> None:
    flags.add_argument(
        "--model",
        type=Path,
        help="a Llama model folder (default: SmolLM2-135M-Instruct, prepared once)",
    )


def add_texts(flags: argparse.ArgumentParser) -> None:
    flags.add_argument(
        "--texts",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="long plain texts (default: what the system has)",
    )
    flags.add_argument(
        "--centres",
        type=Path,
        metavar="FILE",
        help="centres of this model (hotkv_sparse.vllm.calibrate)",
    )


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: list(tokenizer(text, verbose=False)["input_ids"])


@dataclass(frozen=True, slots=True)
class Text:
    """source: files, or the text that it was made from."""

    name: str
    source: str
    tokens: tuple[int, ...]

    @property
    def copy(self) -> bool:
        return self.name == REPEAT


def _licences() -> tuple[str, list[Path]]:
    return "gpl3", [LICENCES / "GPL-3", LICENCES / "LGPL-3"]


def _vim_manual() -> tuple[str, list[Path]]:
    chapters = sorted(Path("/usr/share/vim").glob("vim*/doc/usr_*.txt"))
    return "vimdoc", [file for file in chapters if file.stem != "usr_toc"]


def _prose() -> tuple[str, list[Path]]:
    spec = importlib.util.find_spec("tvm_ffi")
    folders = [Path(spec.origin).parent / "3rdparty/libbacktrace"] if spec and spec.origin else []
    folders += [Path("/usr/lib/go/src/testdata"), Path("/usr/local/go/src/testdata")]
    return "prose", [folder / OPTICKS for folder in folders if (folder / OPTICKS).is_file()][:1]


def _read(
    name: str, files: Sequence[Path], encode: Callable[[str], list[int]], num_tokens: int
) -> Text | None:
    if not files or not all(file.is_file() for file in files):
        return None
    tokens = encode("\n".join(file.read_text(errors="replace") for file in files)[: 8 * num_tokens])
    if len(tokens) < num_tokens:
        return None
    return Text(
        name,
        f"{files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else ""),
        tuple(tokens[:num_tokens]),
    )


def copy_text(source: Text, num_quoted: int) -> Text:
    """The last `num_quoted` tokens repeat those from QUOTED_FROM_RATIO on."""
    tokens = source.tokens[: len(source.tokens) - num_quoted]
    begin = int(QUOTED_FROM_RATIO * len(tokens))
    return Text(
        REPEAT,
        f"{source.name}, its tokens from {begin} on repeated",
        tokens + tokens[begin : begin + num_quoted],
    )


def texts(
    files: Sequence[Path], encode: Callable[[str], list[int]], num_tokens: int, num_quoted: int
) -> list[Text]:
    """Of `files`, or of the system, and the copy text of the last. Raises ValueError if a file
    is too short, or the system has none."""
    named = [(file.stem, [file]) for file in files] or [_licences(), _vim_manual(), _prose()]
    found = [_read(name, paths, encode, num_tokens) for name, paths in named]
    if files and None in found:
        short = files[found.index(None)]
        raise ValueError(
            f"--texts: {short} is no file of {num_tokens} tokens or more; pass longer texts"
        )
    chosen = [text for text in found if text is not None]
    if not chosen:
        raise ValueError(
            f"no text of {num_tokens} tokens found on this system; pass some with --texts"
        )
    return [*chosen, copy_text(chosen[-1], num_quoted)]
