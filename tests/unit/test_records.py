"""The record file: what goes in comes out, and no damage passes as data."""

import json
import struct

import numpy as np
import pytest

from devsample.errors import RunFolderError
from devsample.records import BASE_FIELDS, RecordWriter, read_records

DTYPE = np.dtype([*BASE_FIELDS, ("norms", "<f4", (2, 3)), ("hits", "|u1", (5,)), ("flag", "?")])


def some_rows(count: int, start: int = 0) -> np.ndarray:
    random = np.random.default_rng(start)
    rows = np.zeros(count, DTYPE)
    rows["draw"] = np.arange(start, start + count)
    rows["step"] = 3 * rows["draw"]
    for name in ("loss", "baseline", "llc"):
        rows[name] = random.normal(size=count)
    rows["norms"] = random.normal(size=(count, 2, 3))
    rows["hits"] = random.integers(0, 256, size=(count, 5))
    rows["flag"] = random.integers(0, 2, size=count)
    return rows


@pytest.fixture
def path(tmp_path):
    return tmp_path / "draws.bin"


def write(path, *blocks, chain=3) -> list[int]:
    """Write blocks; returns the offset before each and after the last."""
    writer = RecordWriter(path, chain, DTYPE)
    offsets = [writer.offset]
    for block in blocks:
        writer.append(block)
        offsets.append(writer.offset)
    writer.close()
    return offsets


def test_round_trip(path):
    rows = some_rows(7)
    rows["loss"][:3] = [np.nan, np.inf, -0.0]
    write(path, rows[:4], rows[4:5], rows[5:])
    chain, back = read_records(path)
    assert chain == 3
    assert back.dtype == DTYPE
    assert back.tobytes() == rows.tobytes()


def test_no_block_and_an_empty_block_are_no_draws(path):
    write(path)
    assert len(read_records(path)[1]) == 0
    write(path, some_rows(0), some_rows(2))
    assert read_records(path)[1].tobytes() == some_rows(2).tobytes()


def test_rows_are_in_the_file_when_append_returns(path):
    writer = RecordWriter(path, 0, DTYPE)
    writer.append(some_rows(2))
    assert len(read_records(path)[1]) == 2
    assert writer.offset == path.stat().st_size
    writer.close()
    writer.close()  # twice does no harm


def test_strided_rows_are_written_as_they_read(path):
    rows = some_rows(10)
    write(path, rows[::-2])
    assert read_records(path)[1].tobytes() == np.ascontiguousarray(rows[::-2]).tobytes()


def test_the_header_says_chain_fields_dtypes_and_shapes(path):
    write(path)
    data = path.read_bytes()
    magic = b"DEVSAMPLE-RECORDS-1\n"
    assert data.startswith(magic)
    (length,) = struct.unpack_from("<I", data, len(magic))
    assert len(data) == len(magic) + 4 + length
    assert json.loads(data[len(magic) + 4 :]) == {
        "chain": 3,
        "fields": [
            ["draw", "<i8", []],
            ["step", "<i8", []],
            ["loss", "<f8", []],
            ["baseline", "<f8", []],
            ["llc", "<f8", []],
            ["norms", "<f4", [2, 3]],
            ["hits", "|u1", [5]],
            ["flag", "|b1", []],
        ],
    }


def test_a_new_writer_starts_the_file_anew(path):
    write(path, some_rows(5))
    write(path, some_rows(1))
    assert len(read_records(path)[1]) == 1


def test_a_file_cut_anywhere_in_its_last_block_reads_up_to_it(path):
    _, second, end = write(path, some_rows(3), some_rows(2, start=3))
    data = path.read_bytes()
    assert len(data) == end
    for size in range(second, end):
        path.write_bytes(data[:size])
        assert read_records(path)[1].tobytes() == some_rows(3).tobytes(), size
    path.write_bytes(data)
    assert len(read_records(path)[1]) == 5


def test_a_file_cut_anywhere_in_its_header_is_refused_by_name(path):
    (header,) = write(path)
    data = path.read_bytes()
    for size in range(header):
        path.write_bytes(data[:size])
        with pytest.raises(RunFolderError, match=r"draws\.bin"):
            read_records(path)


def test_a_changed_byte_before_the_last_block_is_found(path):
    first, second, _ = write(path, some_rows(2), some_rows(2, start=2))
    data = path.read_bytes()
    for position in range(first, second):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :])
        with pytest.raises(RunFolderError, match=rf"draws\.bin: damaged block at byte {first}"):
            read_records(path)


def test_a_changed_byte_in_the_rows_of_the_last_block_is_found(path):
    _, second, end = write(path, some_rows(2), some_rows(2, start=2))
    data = path.read_bytes()
    for position in range(second + 12, end):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x01]) + data[position + 1 :])
        with pytest.raises(RunFolderError, match=f"damaged block at byte {second}"):
            read_records(path)


def test_a_foreign_file_is_refused_and_left_as_it_is(path):
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(RunFolderError, match="not a devsample record file"):
        read_records(path)
    assert path.read_bytes() == b"PK\x03\x04 something else"


def test_a_damaged_header_is_refused(path):
    write(path, some_rows(1))
    data = path.read_bytes()
    for old, new in ((b'"chain"', b'"chian"'), (b'"<f8"', b'"<q9"'), (b"{", b"[")):
        path.write_bytes(data.replace(old, new, 1))
        with pytest.raises(RunFolderError, match="damaged header"):
            read_records(path)
