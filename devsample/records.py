r"""The one format of recorded draws: what a chain writes, streams, and anyone reads back.

A file is a header and blocks. All integers are little-endian::

    header  b"DEVSAMPLE-RECORDS-1\n", uint32 length,
            JSON {"chain": int, "fields": [[name, dtype, shape], ...]}
    block   b"BLOK", uint32 rows, uint32 CRC-32 of these 8 bytes, uint32 CRC-32 of the records,
            rows × packed record

A record is one draw of one chain: named float64 scalars and named arrays, each with its dtype and
shape. A file that was cut off within its last block (a killed chain) reads up to that block.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from devsample.errors import RunFolderError

_MAGIC = b"DEVSAMPLE-RECORDS-1\n"
_BLOCK = struct.Struct("<4sIII")
_BLOCK_START = struct.Struct("<4sI")
_LENGTH = struct.Struct("<I")

BASE_FIELDS = (
    ("draw", "<i8"),
    ("step", "<i8"),
    ("loss", "<f8"),
    ("baseline", "<f8"),
    ("llc", "<f8"),
)


class RecordWriter:
    """Appends blocks of one chain's records to its file.

    Args:
        path: the file; it is started anew.
        chain: the chain's number.
        dtype: structured dtype of a record.
        offset: go on with the file that is there, from this many bytes on.
    """

    def __init__(self, path: Path, chain: int, dtype: np.dtype, *, offset: int | None = None) -> None:
        self._dtype = dtype
        if offset is not None:
            os.truncate(path, offset)
            self._file: BinaryIO = path.open("ab")
            return
        fields = [[name, dtype[name].base.str, list(dtype[name].shape)] for name in dtype.names or ()]
        header = json.dumps({"chain": chain, "fields": fields}).encode()
        new = path.with_name(path.name + ".tmp")
        new.write_bytes(_MAGIC + _LENGTH.pack(len(header)) + header)
        os.replace(new, path)  # a file always has a whole header
        self._file = path.open("ab")

    def append(self, rows: np.ndarray) -> None:
        """Write ``rows`` (structured, 1-d) as one block; they are in the file when this returns."""
        payload = np.ascontiguousarray(rows, dtype=self._dtype).tobytes()
        start = _BLOCK_START.pack(b"BLOK", len(rows))
        self._file.write(_BLOCK.pack(b"BLOK", len(rows), zlib.crc32(start), zlib.crc32(payload)) + payload)
        self._file.flush()

    @property
    def offset(self) -> int:
        """Bytes written so far; a resumed chain cuts its file here."""
        return self._file.tell()

    def close(self) -> None:
        """Write everything to disk and close the file."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def read_records(path: Path) -> tuple[int, np.ndarray]:
    """Chain number and all whole records of a file, as one structured array.

    Raises:
        RunFolderError: the file is not of this format, or is damaged before its last block.
    """
    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        raise RunFolderError(f"{path} is not a devsample record file; it was left as it is.")
    start = len(_MAGIC) + _LENGTH.size
    try:
        (length,) = _LENGTH.unpack_from(data, len(_MAGIC))
        header = json.loads(data[start : start + length])
        dtype = np.dtype([(name, kind, tuple(shape)) for name, kind, shape in header["fields"]])
        chain = int(header["chain"])
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path}: damaged header ({error}).") from error
    return chain, _read_blocks(path, data, start + length, dtype)


def _read_blocks(path: Path, data: bytes, position: int, dtype: np.dtype) -> np.ndarray:
    blocks = [np.empty(0, dtype)]
    while position + _BLOCK.size <= len(data):
        magic, rows, start, checksum = _BLOCK.unpack_from(data, position)
        sound = magic == b"BLOK" and zlib.crc32(data[position:][: _BLOCK_START.size]) == start
        payload = data[position + _BLOCK.size :][: rows * dtype.itemsize]
        end = position + _BLOCK.size + rows * dtype.itemsize
        if not sound or (end <= len(data) and zlib.crc32(payload) != checksum):
            raise RunFolderError(f"{path}: damaged block at byte {position}; earlier draws are whole.")
        if end > len(data):
            break  # cut off while it was being written
        blocks.append(np.frombuffer(payload, dtype))
        position = end
    return np.concatenate(blocks)
