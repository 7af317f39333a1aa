"""Settings: what is accepted, and that every refusal names key, value, rule and remedy."""

from __future__ import annotations

import pytest

from upipe_integrations import UPipeConfig


def test_a_block_becomes_a_config():
    assert UPipeConfig.from_mapping({"chunk_heads": 4}) == UPipeConfig(chunk_heads=4, kernel="auto")
    assert UPipeConfig.from_mapping({"chunk_heads": 8, "kernel": "math"}).kernel == "math"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"chunk_head": 4}, r"upipe\.chunk_head = 4: unknown key \(did you mean 'chunk_heads'\?\)"),
        ({}, r"upipe\.chunk_heads is missing.*Set it to"),
        ({"chunk_heads": "4"}, r"upipe\.chunk_heads = '4': must be an integer"),
        ({"chunk_heads": 4.0}, r"upipe\.chunk_heads = 4\.0: must be an integer"),
        ({"chunk_heads": True}, r"upipe\.chunk_heads = True: must be an integer"),
        ({"chunk_heads": 0}, r"upipe\.chunk_heads = 0: must be positive"),
        ({"chunk_heads": -4}, r"upipe\.chunk_heads = -4: must be positive"),
        ({"chunk_heads": 4, "kernel": "flash"}, r"upipe\.kernel = 'flash': no such kernel.*did you mean"),
        ({"chunk_heads": 4, "kernel": None}, r"upipe\.kernel = None"),
        ({"chunk_heads": 4, "memory": "fuse"}, r"upipe\.memory = 'fuse': no such memory \(did you mean 'fused'\?\)"),
        ({"chunk_heads": 4, "query_blocks": 0}, r"upipe\.query_blocks = 0: must be positive .*default of 4"),
        ({"chunk_heads": 4, "query_blocks": "2"}, r"upipe\.query_blocks = '2': must be an integer"),
        ({"chunk_heads": 4, "overlap": 1}, r"upipe\.overlap = 1: must be true or false"),
        ({"chunk_heads": 4, "accumulate": "fp32"}, r"upipe\.accumulate = 'fp32': no such accumulate.*auto, float32"),
        (4, r"upipe = 4: must be a block"),
        (None, r"upipe = None: must be a block"),
    ],
)
def test_bad_blocks_are_refused(block, message):
    with pytest.raises(ValueError, match=message):
        UPipeConfig.from_mapping(block)


@pytest.mark.parametrize(
    ("chunk_heads", "ranks", "message"),
    [
        (6, 4, r"chunk_heads = 6: must be a multiple of the 4 .*Values that fit this model: 4, 8, 16, 32\."),
        (2, 4, r"chunk_heads = 2: must be a multiple of the 4"),
        (64, 4, r"chunk_heads = 64: larger than the model's 32 query heads"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(chunk_heads, ranks, message):
    with pytest.raises(ValueError, match=message):
        UPipeConfig(chunk_heads).schedule(heads=32, kv_heads=8, ranks=ranks)
