import subprocess
import sys
import threading

import pytest

from kvstore.core.extent import ALIGNMENT
from kvstore.errors import ConfigError
from kvstore.tiers.direct import aligned_memory
from kvstore.tiers.ssd import SsdRegions
from kvstore.tiers.tier import FailureReason, TierFailure
from kvstore.units import KIB, MIB, Bytes

REGION = Bytes(256 * KIB)


@pytest.fixture
def open_regions(tmp_path):
    opened = []

    def open_them(folder=tmp_path / "ssd", *, capacity=Bytes(4 * REGION), region_bytes=REGION):
        regions = SsdRegions(folder, capacity=capacity, region_bytes=region_bytes)
        opened.append(regions)
        return regions

    yield open_them
    for regions in opened:
        regions.close()


def read(regions, region, offset, size):
    out = bytearray(size)
    regions.read_into(region, offset, memoryview(out))
    return bytes(out)


def test_what_is_written_is_read_back_whatever_its_length(open_regions):
    regions = open_regions()
    for region, size in enumerate((1, ALIGNMENT, ALIGNMENT + 1, 3 * ALIGNMENT - 1)):
        payload = bytes(number % 251 for number in range(size))
        regions.write(region, ALIGNMENT, [bytes(ALIGNMENT), memoryview(payload)])
        assert read(regions, region, 2 * ALIGNMENT, size) == payload


def test_memory_on_and_off_the_page_boundary_gives_the_same_bytes(open_regions):
    """Aligned memory goes to the disk and comes from it without a copy; anything else, and ends of sectors, through staging."""
    regions = open_regions()
    sizes = (1, ALIGNMENT - 1, ALIGNMENT, 2 * ALIGNMENT + 7, 3 * ALIGNMENT)
    for before in (0, 5, ALIGNMENT):
        for shift in (0, 1):
            for size in sizes:
                source = aligned_memory(size + shift)[shift:]
                source[:] = bytes((number * 7 + size) % 251 for number in range(size))
                regions.write(0, ALIGNMENT, [b"h" * before, source, b"tail"])
                expected = b"h" * before + bytes(source) + b"tail"
                for into in (aligned_memory(len(expected)), aligned_memory(len(expected) + 1)[1:]):
                    regions.read_into(0, ALIGNMENT, into)
                    assert bytes(into) == expected, (before, shift, size)


def test_a_write_is_padded_with_zeros_so_that_nothing_older_shows(open_regions):
    regions = open_regions()
    regions.write(0, 0, [b"\xff" * (2 * ALIGNMENT)])
    regions.write(0, 0, [b"new"])
    assert read(regions, 0, 0, 2 * ALIGNMENT) == b"new" + bytes(ALIGNMENT - 3) + b"\xff" * ALIGNMENT


def test_a_reopened_folder_has_its_regions_and_their_bytes(open_regions):
    first = open_regions()
    first.write(2, 0, [b"kept"])
    first.sync(2)
    first.close()
    first.close = lambda: None
    second = open_regions()
    assert second.existing() == (2,)
    assert read(second, 2, 0, 4) == b"kept"


def test_threads_write_and_read_different_spans_at_the_same_time(open_regions):
    regions = open_regions()
    failures = []

    def work(number):
        payload = bytes([number]) * (5 * ALIGNMENT - number)
        for _ in range(20):
            regions.write(number % 2, number * 5 * ALIGNMENT, [payload])
            if read(regions, number % 2, number * 5 * ALIGNMENT, len(payload)) != payload:
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_short_read_is_a_failure_and_never_passed_on_as_full(open_regions, tmp_path):
    regions = open_regions()
    regions.write(0, 0, [b"\x01" * (8 * ALIGNMENT)])
    with open(tmp_path / "ssd" / "region-000000", "r+b") as file:
        file.truncate(4 * ALIGNMENT + 100)
    with pytest.raises(TierFailure) as caught:
        read(regions, 0, 0, 8 * ALIGNMENT)
    assert caught.value.reason is FailureReason.SHORT_READ
    assert read(regions, 0, 0, 4 * ALIGNMENT) == b"\x01" * (4 * ALIGNMENT)


def test_a_region_whose_file_is_gone_is_a_failure(open_regions):
    with pytest.raises(TierFailure):
        read(open_regions(), 3, 0, 1)


def test_two_nodes_on_one_folder_are_refused(open_regions):
    open_regions()
    with pytest.raises(ConfigError, match="in use by another store node"):
        open_regions()


def test_the_lock_goes_with_the_process_that_held_it(open_regions, tmp_path):
    script = (
        "import sys; from pathlib import Path; from kvstore.tiers.ssd import SsdRegions\n"
        f"regions = SsdRegions(Path({str(tmp_path / 'ssd')!r}), capacity=1 << 20, region_bytes=1 << 18)\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    with pytest.raises(ConfigError):
        open_regions()
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    assert open_regions().count == 4


def test_a_capacity_larger_than_the_medium_is_a_config_error(open_regions):
    with pytest.raises(ConfigError, match="ssd_capacity"):
        open_regions(capacity=Bytes(1 << 60))


def test_a_refused_start_leaves_the_folder_unlocked(open_regions):
    with pytest.raises(ConfigError):
        open_regions(capacity=Bytes(1 << 60))
    assert open_regions().count == 4


def test_a_path_that_is_no_folder_is_a_config_error(open_regions, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_regions(tmp_path / "file")


def test_another_region_size_is_recognised_before_anything_is_read(open_regions):
    first = open_regions()
    first.close()
    first.close = lambda: None
    with pytest.raises(ConfigError, match="ssd_discard_other_formats=true"):
        open_regions(region_bytes=Bytes(128 * KIB))


def test_files_beyond_a_smaller_capacity_are_given_back(open_regions, tmp_path):
    first = open_regions()
    first.write(3, 0, [b"x"])
    first.close()
    first.close = lambda: None
    second = open_regions(capacity=Bytes(2 * REGION))
    assert second.existing() == ()
    assert not (tmp_path / "ssd" / "region-000003").exists()


def test_a_full_medium_refuses_a_new_region_and_leaves_no_part_of_it(tiny_tmpfs, open_regions):
    regions = open_regions(tiny_tmpfs(Bytes(MIB)) / "ssd", capacity=Bytes(MIB))
    regions.write(0, 0, [b"kept"])
    filler = regions.folder.parent / "of-somebody-else"
    filler.write_bytes(bytes(600 * KIB))
    with pytest.raises(TierFailure) as caught:
        regions.write(1, 0, [b"no room"])
    assert caught.value.reason is FailureReason.NO_SPACE
    assert regions.existing() == (0,)
    assert read(regions, 0, 0, 4) == b"kept"
    filler.unlink()
    regions.write(1, 0, [b"room again"])
    assert read(regions, 1, 0, 10) == b"room again"


def test_a_folder_of_another_format_is_emptied_only_when_asked(tmp_path):
    folder = tmp_path / "ssd"
    old = SsdRegions(folder, capacity=Bytes(4 * REGION), region_bytes=REGION)
    old.write(0, 0, [b"x" * ALIGNMENT])
    old.close()
    shape = folder / "SHAPE"
    shape.write_text(shape.read_text().replace("format ", "format 9"))
    with pytest.raises(ConfigError, match="format 9"):
        SsdRegions(folder, capacity=Bytes(4 * REGION), region_bytes=REGION)
    assert (folder / "region-000000").exists(), "a refusal touches nothing"
    new = SsdRegions(folder, capacity=Bytes(4 * REGION), region_bytes=REGION, discard_other_formats=True)
    assert new.existing() == ()
    new.close()
    SsdRegions(folder, capacity=Bytes(4 * REGION), region_bytes=REGION).close()


def test_a_folder_that_cannot_be_marked_as_ours_is_named_in_the_refusal(open_regions, tmp_path):
    (tmp_path / "ssd" / "SHAPE.new").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"ssd_path .*/ssd cannot be used: Is a directory"):
        open_regions()
