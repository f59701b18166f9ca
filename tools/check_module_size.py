"""A module is about one idea: from 400 lines on it is named, above 600 the check fails. Generated
code doesn't count."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "proto",
    "sparse",
    "client",
    "server",
    "connector_vllm",
    "tools",
    "demo",
    "bench",
    "tests",
)
SMELL_LINES = 400
LIMIT_LINES = 600


def main() -> int:
    """Command line."""
    too_long = False
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                continue
            num_lines = len(path.read_text().splitlines())
            if num_lines >= SMELL_LINES:
                verdict = "too long" if num_lines > LIMIT_LINES else "getting long"
                print(
                    f"{path.relative_to(ROOT)}: {num_lines} lines, {verdict} (limit {LIMIT_LINES})"
                )
            too_long |= num_lines > LIMIT_LINES
    return int(too_long)


if __name__ == "__main__":
    sys.exit(main())
