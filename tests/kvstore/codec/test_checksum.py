import subprocess
import sys

from kvstore.codec.checksum import payload_checksum


def test_the_checksum_of_known_bytes_never_changes() -> None:
    assert payload_checksum(b"") == 0x2D06800538D394C2  # published test vector of XXH3-64
    assert payload_checksum(b"abc") == 8696274497037089104
    assert payload_checksum(bytes(range(256)) * 64) == 0xC96B04EBEFA8F6DC


def test_every_kind_of_buffer_gives_the_same_number() -> None:
    data = bytes(range(100))
    assert payload_checksum(data) == payload_checksum(bytearray(data)) == payload_checksum(memoryview(b"x" + data)[1:])


def test_one_flipped_bit_changes_the_number() -> None:
    data = bytearray(1000)
    clean = payload_checksum(data)
    for position in range(0, 8000, 7):
        data[position // 8] ^= 1 << position % 8
        assert payload_checksum(data) != clean
        data[position // 8] ^= 1 << position % 8


def test_a_store_node_needs_neither_numba_nor_numpy_nor_torch_for_it() -> None:
    program = "import sys, kvstore.codec.checksum; print(sorted({'numba', 'numpy', 'torch'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"
