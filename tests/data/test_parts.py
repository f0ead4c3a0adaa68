import gzip
import lzma

import pytest

from lmforge.data.parts import xz_size
from lmforge.data.shards import read_manifest
from texts import prepared, some_text, texts_of


def test_compression_reference_is_per_file(corpus, cache):
    folder = prepared(corpus, cache)
    files = [text.encode() for text in texts_of(folder)["val"]]
    manifest, total = read_manifest(folder), sum(map(len, files))
    assert len(files) > 1
    assert manifest["gzip_bits_per_byte"] == 8 * sum(len(gzip.compress(data, 9)) for data in files) / total
    assert manifest["xz_bits_per_byte"] == 8 * sum(len(lzma.compress(data, preset=9)) for data in files) / total
    assert manifest["xz_bits_per_byte"] != 8 * len(lzma.compress(b"".join(files), preset=9)) / total


@pytest.mark.parametrize("n", [0, 1, 5000, 70_000])
def test_a_small_dictionary_gives_the_size_of_xz(n):
    data = some_text(0, 1 + n // 7).encode()[:n]
    assert xz_size(data) == len(lzma.compress(data, preset=9))
