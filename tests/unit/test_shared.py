"""Files and blocks of memory that several processes map."""

import gc
import mmap
import multiprocessing.shared_memory
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from devsample.errors import LoaderError
from devsample.memory import Region, memory_of, save_storages
from devsample.serialize import pack, unpack
from devsample.shared import (
    LINUX,
    FileMaps,
    MappedFiles,
    SharedBlock,
    address_of,
    load_storages,
    map_and_keep,
    on_local_disk,
)

linux_only = pytest.mark.skipif(not LINUX, reason="says what Linux tells")
BOTH_WAYS = pytest.mark.parametrize("ask_system", [LINUX, False] if LINUX else [False])


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "numbers file.bin"
    np.arange(200_000, dtype=np.int64).tofile(path)
    return path


def part_of(file: Path, offset: int, nbytes: int) -> Region:
    return Region(str(file), offset, nbytes, file.stat().st_ino)


def numbers(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64).set_(storage)


# ---- regions ------------------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_the_region_of_a_memory_map_and_of_its_parts(mode, ask_system, file):
    mapped = np.memmap(file, np.int64, mode, offset=4096 * 3 + 80, shape=(100_000,))
    maps = FileMaps(ask_system=ask_system)
    maps.note(mapped)
    for part in (mapped, mapped[70_000:], mapped[1000:90_000:7], np.asarray(mapped)[5:]):
        region = maps.region(part.ctypes.data, 8)
        assert region == part_of(file, int(part[0]) * 8, 8)  # an item is its number in the file


@BOTH_WAYS
def test_a_private_map_counts_only_where_it_was_not_written(ask_system, file):
    mapped = np.memmap(file, np.int64, "c")
    mapped[100_000] = -1
    maps = FileMaps(ask_system=ask_system)
    maps.note(mapped)
    start = mapped.ctypes.data
    assert maps.region(start, 400_000) == part_of(file, 0, 400_000)
    assert maps.region(start, mapped.nbytes) is None
    assert maps.region(start + 900_000, 400_000) == part_of(file, 900_000, 400_000)


@BOTH_WAYS
def test_ordinary_memory_is_no_region(ask_system, file):
    array = np.zeros(100_000)
    mapped = np.memmap(file, np.int64, "r")
    maps = FileMaps(ask_system=ask_system)
    maps.note(mapped)
    assert maps.region(array.ctypes.data, array.nbytes) is None
    assert maps.region(mapped.ctypes.data, mapped.nbytes + (1 << 20)) is None  # reaches beyond it


@BOTH_WAYS
def test_a_storage_that_torch_mapped(ask_system, file):
    storage = torch.UntypedStorage.from_file(str(file), True, 1_600_000)
    maps = FileMaps(ask_system=ask_system)
    maps.note_storage(storage)
    assert maps.region(storage.data_ptr() + 80, 800) == part_of(file, 80, 800)


@BOTH_WAYS
def test_what_devsample_mapped_is_known_everywhere(ask_system, tmp_path):
    save_storages([torch.arange(100_000).untyped_storage()], tmp_path / "file")
    (storage,) = load_storages(tmp_path / "file")
    region = FileMaps(ask_system=ask_system).region(storage.data_ptr(), storage.nbytes())
    assert region is not None
    assert torch.equal(numbers(MappedFiles().storage(region)), torch.arange(100_000))
    numbers(storage)[7] = 1
    assert FileMaps(ask_system=ask_system).region(storage.data_ptr(), storage.nbytes()) is None


@linux_only
def test_maps_that_only_the_system_knows_of(file):
    """torch.load(mmap=True) and the like: no object says where the memory comes from."""
    private = torch.UntypedStorage.from_file(str(file), False, 1_600_000)
    part = private[800:80_000]
    assert FileMaps().region(part.data_ptr(), part.nbytes()) == part_of(file, 800, 79_200)


@linux_only
def test_a_map_in_several_pieces_is_one(file):
    mapped = np.memmap(file, np.int64, "r")
    mapped._mmap.madvise(mmap.MADV_DONTFORK, 0, 800_000 // mmap.PAGESIZE * mmap.PAGESIZE)
    pieces = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line]
    assert len(pieces) == 2
    assert FileMaps().region(mapped.ctypes.data, mapped.nbytes) == part_of(file, 0, 1_600_000)


@linux_only
def test_memory_that_its_owner_may_take_away_is_no_region():
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=100_000)
    try:
        array = np.frombuffer(memory.buf, np.uint8)
        assert Path("/dev/shm", memory.name).exists()
        assert FileMaps().region(array.ctypes.data, array.nbytes) is None
        del array
    finally:
        memory.close()
        memory.unlink()


COVERED = """
import subprocess, sys
import numpy as np
from devsample.shared import FileMaps
path, other = sys.argv[1:]
mapped = np.memmap(path, np.int64, "r")
assert FileMaps().region(mapped.ctypes.data, mapped.nbytes) is not None
subprocess.run(["mount", "--bind", other, path], check=True)
assert FileMaps().region(mapped.ctypes.data, mapped.nbytes) is None
"""


@pytest.mark.slow
@linux_only
def test_a_path_that_leads_to_another_file_by_now_is_not_used(file):
    other = file.with_name("other.bin")
    other.write_bytes(file.read_bytes())
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no private mount namespace here")
    command = ["unshare", "-m", sys.executable, "-c", COVERED, str(file), str(other)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_region_is_mapped_once_and_overlaps(file):
    files = MappedFiles()
    first, second = files.storage(Region(str(file), 0, 800)), files.storage(Region(str(file), 400, 800))
    numbers(first)[60] = -3
    assert numbers(second)[10] == -3
    assert np.fromfile(file, np.int64)[60] == 60


def test_a_kept_file_can_be_mapped_after_it_was_deleted(file):
    mapped = map_and_keep(file)
    file.unlink()
    region = FileMaps().region(address_of(mapped) + 80, 800)
    if not LINUX:
        assert region is None
        return
    assert region is not None
    assert region.inode == os.stat(region.path).st_ino
    assert numbers(MappedFiles().storage(region))[0] == 10
    descriptors = len(os.listdir("/proc/self/fd"))
    del mapped
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < descriptors
    with pytest.raises(LoaderError):
        MappedFiles().storage(region)


def test_a_file_that_was_replaced_is_named(file):
    mapped = np.memmap(file, np.int64, "r")
    region = part_of(file, 0, mapped.nbytes)
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    other.replace(file)
    with pytest.raises(LoaderError, match="is not the file that it was"):
        MappedFiles().storage(region)


def test_an_empty_file_is_named(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(LoaderError, match="empty"):
        MappedFiles().storage(Region(str(tmp_path / "empty"), 0, 8))


# ---- blocks -------------------------------------------------------------------------------------

STORAGES = [torch.arange(n).untyped_storage() for n in (1000, 0, 70_001)]


def sums_of(regions, connection):
    files = MappedFiles()
    tensors = [numbers(files.storage(region)) for region in regions]
    sums = [int(one.sum()) for one in tensors]
    tensors[0].fill_(5)
    connection.send(sums)


@pytest.mark.parametrize("in_file", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_other_processes_map_a_block_for_themselves(in_file):
    block = SharedBlock(STORAGES, in_file=in_file)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=sums_of, args=(block.regions, theirs))
    process.start()
    assert ours.poll(120)
    assert ours.recv() == [sum(range(n)) for n in (1000, 0, 70_001)]
    process.join()
    again = numbers(MappedFiles().storage(block.regions[0]))
    assert torch.equal(again, torch.arange(1000))  # not what the other process wrote
    block.close()
    with pytest.raises(LoaderError, match="cannot be opened"):
        MappedFiles().storage(block.regions[0])


@pytest.mark.parametrize("in_file", [False, True])
def test_who_mapped_a_block_keeps_it(in_file):
    block = SharedBlock(STORAGES, in_file=in_file)
    storage = MappedFiles().storage(block.regions[2])
    block.close()
    assert numbers(storage)[70_000] == 70_000


@linux_only
def test_another_file_that_got_the_number_of_a_closed_block_is_not_taken_for_it(file):
    block = SharedBlock(STORAGES)
    number = int(block.regions[0].path.rsplit("/", 1)[1])
    block.close()
    other = os.open(file, os.O_RDONLY)
    os.dup2(other, number)
    try:
        with pytest.raises(LoaderError, match="is not the file that it was"):
            MappedFiles().storage(block.regions[0])
    finally:
        for descriptor in {other, number}:
            os.close(descriptor)


def test_a_block_in_a_file_is_removed_with_its_owner_and_at_exit():
    block = SharedBlock(STORAGES, in_file=True)
    path = Path(block.regions[0].path)
    assert path.exists()
    del block
    gc.collect()
    assert not path.exists()
    script = (
        "import torch; from devsample.shared import SharedBlock\n"
        "block = SharedBlock([torch.zeros(1000).untyped_storage()], in_file=True)\n"
        "print(block.regions[0].path)"
    )
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert made.stdout.strip()
    assert not Path(made.stdout.strip()).exists()


@linux_only
def test_a_block_leaves_no_file_and_uses_no_shared_memory_folder():
    before = os.listdir("/dev/shm")
    block = SharedBlock(STORAGES)
    assert not [name for name in os.listdir("/dev/shm") if name not in before and "devsample" in name]
    assert os.readlink(block.regions[0].path).startswith("/memfd:")
    descriptors = len(os.listdir("/proc/self/fd"))
    block.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1


# ---- elsewhere ----------------------------------------------------------------------------------


def test_without_what_linux_offers(file, tmp_path, monkeypatch):
    """The same results from files and from what the objects say."""
    monkeypatch.setattr("devsample.shared.LINUX", False)
    mapped = np.memmap(file, np.int64, "r+")
    tensor = torch.from_file(str(file), shared=True, size=200_000, dtype=torch.int64)
    rows = torch.arange(100_000)
    packed = pack([mapped[50_000:], tensor, rows], "thing")
    assert [one.nbytes() for one in packed.storages] == [800_000]
    block = SharedBlock(packed.storages)
    assert Path(block.regions[0].path).is_file()
    back = unpack(packed.data, [MappedFiles().storage(region) for region in block.regions])
    again = pack(back, "thing")  # as for workers of a process that got it
    assert again.storages == ()
    np.testing.assert_array_equal(back[0], mapped[50_000:])
    assert torch.equal(back[1], tensor)
    back[2][5] = -1  # a private write
    assert pack(back, "thing").storages[0].nbytes() == 800_000
    assert torch.equal(numbers(MappedFiles().storage(block.regions[0])), rows)
    save_storages(packed.storages, tmp_path / "kept")
    (kept,) = load_storages(tmp_path / "kept", keep=True)
    region = FileMaps().region(kept.data_ptr(), kept.nbytes())
    assert region is not None
    assert region.path == str(tmp_path / "kept")
    block.close()


# ---- the rest -----------------------------------------------------------------------------------


def test_the_bytes_of_a_storage():
    tensor = torch.tensor([1, 256])
    view = memory_of(tensor.untyped_storage())
    assert view.tobytes() == tensor.numpy().tobytes()
    view[0] = 7
    assert tensor[0] == 7
    expected = bytes(memory_of(tensor.untyped_storage()))
    held = memory_of(tensor.untyped_storage())
    del tensor
    gc.collect()
    assert bytes(held) == expected


@linux_only
def test_local_disks(tmp_path):
    assert on_local_disk(Path("/dev/shm"))
    assert not on_local_disk(Path("/proc/self/maps"))
