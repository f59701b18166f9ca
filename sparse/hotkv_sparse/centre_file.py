"""Reads and writes files of `Centres`: an npz archive without compression or pickled objects. A
file is checked whole when read; a broken or foreign one is refused with INVALID_FIELD, which names
file and problem. It is replaced atomically.

Arrays, for L layers with H KV heads of D channels and F formats:
- `format_version` int64 [], `model` text [], `num_tokens` int64 [].
- `layers` int64 [L], ascending.
- `formats` text [F] and `bias` float64 [L, F]: NaN if not measured; unknown formats are ignored.
- Per layer `mu_<layer>` float32 [H, D].
- Per layer with axes `into_<layer>` float32 [H, D, D] and `rms_<layer>` float32 [H, 2] (`Axes`).
"""

import io
import os
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.axes import Axes
from hotkv_sparse.centre import TOKEN_FORMATS, Centres, LayerCentre
from hotkv_sparse.formats import FORMATS

FORMAT_VERSION = 2
MAX_FILE_BYTES = 1 << 30
"""Far above the centres of any model."""

Array = npt.NDArray[Any]


def read_centres(path: str | os.PathLike[str]) -> Centres:
    """Blocks. Raises INVALID_FIELD if the file is absent or not of `write_centres`."""
    try:
        arrays = _arrays(Path(path))
        return _centres(arrays)
    except HotKVError as error:
        raise _refuse(path, error.message) from None
    except OSError as error:
        raise _refuse(path, f"cannot be read: {error.strerror or error}") from None
    except KeyError as error:
        raise _refuse(path, f"has no array {error.args[0]!r}") from None
    except _BROKEN as error:
        raise _refuse(
            path, f"is no file of centres: {str(error) or type(error).__name__}"
        ) from None


def write_centres(path: str | os.PathLike[str], centres: Centres) -> None:
    """Blocks. Raises OSError, and leaves an existing file unchanged."""
    target = Path(path)
    layers = sorted(centres.layers)
    # None becomes NaN.
    bias = [[centres.bias(layer, name) for name in TOKEN_FORMATS] for layer in layers]
    arrays: dict[str, Array] = {
        "format_version": np.array(FORMAT_VERSION, np.int64),
        "model": np.array(centres.model),
        "num_tokens": np.array(centres.num_tokens, np.int64),
        "layers": np.array(layers, np.int64),
        "formats": np.array(TOKEN_FORMATS),
        "bias": np.array(bias, np.float64),
    }
    arrays |= {f"mu_{layer}": centres.layers[layer].mu for layer in layers}
    for layer in layers:
        if (axes := centres.axes(layer)) is not None:
            arrays |= {f"into_{layer}": axes.into, f"rms_{layer}": axes.rms}
    descriptor, building = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            _write(file, arrays)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(building, target)
    except BaseException:
        Path(building).unlink(missing_ok=True)
        raise


_BROKEN = (
    zipfile.BadZipFile,
    ValueError,
    EOFError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    OverflowError,
    TypeError,
)
"""What zipfile and numpy raise for malformed bytes."""


def _refuse(path: str | os.PathLike[str], problem: str) -> HotKVError:
    return HotKVError(Reason.INVALID_FIELD, f"{os.fspath(path)}: {problem}")


def _write(file: io.BufferedWriter, arrays: dict[str, Array]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            data = io.BytesIO()
            np.lib.format.write_array(data, array, allow_pickle=False)  # type: ignore[no-untyped-call]
            # ZipInfo's fixed date: equal centres give equal bytes.
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), data.getvalue())


def _arrays(path: Path) -> dict[str, Array]:
    """Checks checksums. Refuses compressed arrays: reading then needs no more memory than the
    file has bytes."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise ValueError(f"it has {size} bytes")
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if (
                any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
                or sum(entry.file_size for entry in entries) > size
            ):
                raise ValueError("its arrays are compressed")
            data = {entry.filename.removesuffix(".npy"): archive.read(entry) for entry in entries}
    read = partial(np.lib.format.read_array, allow_pickle=False)
    return {name: read(io.BytesIO(some)) for name, some in data.items()}


def _scalar(arrays: dict[str, Array], name: str, kind: str) -> Array:
    return _array(arrays, name, kind, 0)


def _array(arrays: dict[str, Array], name: str, kind: str, num_axes: int) -> Array:
    """Raises ValueError unless it has `num_axes` axes and numpy's dtype kind `kind`."""
    array = arrays[name]
    if array.dtype.kind != kind or array.ndim != num_axes:
        raise ValueError(f"its array {name!r} is {array.dtype} {list(array.shape)}")
    return array


def _axes(arrays: dict[str, Array], layer: int) -> Axes | None:
    if f"into_{layer}" not in arrays:
        return None
    into, rms = (np.ascontiguousarray(arrays[f"{part}_{layer}"]) for part in ("into", "rms"))
    return Axes(into, rms)


def _centres(arrays: dict[str, Array]) -> Centres:
    version = int(_scalar(arrays, "format_version", "i"))
    if version != FORMAT_VERSION:
        raise ValueError(f"its format_version is {version}, this hotkv reads {FORMAT_VERSION}")
    layers = _array(arrays, "layers", "i", 1).tolist()
    formats = _array(arrays, "formats", "U", 1).tolist()
    bias = np.asarray(_array(arrays, "bias", "f", 2), np.float64)
    if (
        bias.shape != (len(layers), len(formats))
        or len(set(layers)) != len(layers)
        or len(set(formats)) != len(formats)
    ):
        raise ValueError(
            f"its bias is {list(bias.shape)}, its layers {layers} and its formats {formats}"
        )
    if np.isinf(bias).any():
        raise ValueError("its bias has values that are not finite")
    found = {
        layer: LayerCentre(
            np.ascontiguousarray(arrays[f"mu_{layer}"]),
            {
                name: float(value)
                for name, value in zip(formats, row, strict=True)
                if name in FORMATS and not np.isnan(value)
            },
            _axes(arrays, layer),
        )
        for layer, row in zip(layers, bias, strict=True)
    }
    return Centres(
        str(_scalar(arrays, "model", "U")), int(_scalar(arrays, "num_tokens", "i")), found
    )
