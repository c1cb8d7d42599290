from __future__ import annotations

import gc
import shutil
import sys
from pathlib import Path

import pytest

from prefill_node.engine.packed_model import pack
from prefill_node.model.load import load_model


@pytest.mark.skipif(sys.platform != "linux", reason="looks at the mappings of this process as Linux lists them")
def test_packing_lets_go_of_the_weights_file(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder(), tmp_path / "model")

    def is_mapped() -> bool:
        gc.collect()
        return str(folder) in Path("/proc/self/maps").read_text()

    model = load_model(folder, dtype="float32")
    before = is_mapped()
    packed = pack(model.module)
    assert before
    assert not is_mapped()
    assert not list(model.module.parameters())
    assert packed.embedding.shape == (model.vocab_size, packed.width)
