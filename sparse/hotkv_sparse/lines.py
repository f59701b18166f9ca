"""Lines of codes: sixteen tokens side by side, four bytes each, as `formats` defines them."""

import numpy as np
import numpy.typing as npt

from hotkv_sparse.formats import LINE_BYTES, RUN_TOKENS

U8 = npt.NDArray[np.uint8]


def pack_lines(codes: U8, width: int) -> U8:
    """Codes uint8 [..., 16, channels] of `width` bits in lines of 64 bytes, uint8 [..., lines *
    64]."""
    lead, planes = codes.shape[:-2], 8 // width
    num_lines = codes.shape[-1] // (4 * planes)
    codes = codes.reshape(*lead, RUN_TOKENS, num_lines, planes, 4)
    shifts = (np.arange(planes, dtype=np.uint8) * width)[:, None]
    merged = np.bitwise_or.reduce(codes << shifts, axis=-2)
    return np.ascontiguousarray(np.moveaxis(merged, -3, -2)).reshape(*lead, num_lines * LINE_BYTES)


def unpack_lines(data: U8, width: int) -> U8:
    """The inverse of `pack_lines`."""
    lead, planes = data.shape[:-1], 8 // width
    num_lines = data.shape[-1] // LINE_BYTES
    lines = np.moveaxis(data.reshape(*lead, num_lines, RUN_TOKENS, 4), -2, -3)
    shifts = (np.arange(planes, dtype=np.uint8) * width)[:, None]
    codes = (lines[..., None, :] >> shifts) & np.uint8((1 << width) - 1)
    return codes.reshape(*lead, RUN_TOKENS, num_lines * planes * 4).astype(np.uint8)
