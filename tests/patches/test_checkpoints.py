"""Checkpoints that cannot be read."""

import pytest
from fairseq import checkpoint_utils


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut short"])
def test_a_damaged_checkpoint_is_named_with_its_size(tmp_path, content):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(content)
    with pytest.raises(
        RuntimeError, match=rf"checkpoint.pt must be a complete checkpoint, got .* of {len(content)} bytes"
    ):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
