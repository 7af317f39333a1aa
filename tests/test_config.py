"""Settings: what is accepted, and that every refusal names key, value, rule and remedy."""

from __future__ import annotations

import re

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
        ({"chunk_heads": 4, "overlap": 1}, r"upipe\.overlap = 1: must be true, false or 'both'"),
        ({"chunk_heads": 4, "accumulate": "fp32"}, r"upipe\.accumulate = 'fp32': no such accumulate.*auto, float32"),
        (4, r"upipe = 4: must be a block"),
        *(
            (value, rf"upipe = {value}: must be a block.*remove the key to train without")
            for value in (None, False, True)
        ),
        (
            {"enabled": False},
            r"upipe\.enabled = False: there is no switch.*remove the whole 'upipe' key to train without it",
        ),
        ({"enabled": True, "chunk_heads": 4}, r"upipe\.enabled = True: .*Leave 'enabled' out to train with UPipe"),
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


@pytest.mark.parametrize(
    "key",
    ["upip", "u_pipe", "UPipe", "upipe_config", "upipe_chunk_heads", "untied_ulysses", "UntiedUlysses", "chunk_heads"],
)
def test_keys_that_mean_ours_are_refused_wherever_they_stand(key):
    with pytest.raises(ValueError, match=rf"ds_config key '{key}': DeepSpeed knows no such key"):
        UPipeConfig.from_ds_config({key: {"chunk_heads": 4}, "train_batch_size": 1})
    with pytest.raises(ValueError, match=rf"ds_config key '{key}'"):
        UPipeConfig.from_ds_config({key: 4, "upipe": {"chunk_heads": 4}})


@pytest.mark.parametrize("block", ["zero_optimization", "sequence_parallel"])
def test_a_block_in_the_wrong_place_is_refused(block):
    with pytest.raises(ValueError, match=rf"ds_config key '{block}\.upipe': not read there"):
        UPipeConfig.from_ds_config({block: {"stage": 1, "upipe": {"chunk_heads": 4}}})
    right = {block: {"stage": 1}, "upipe": {"chunk_heads": 4}}  # as the message says
    assert UPipeConfig.from_ds_config(right) == UPipeConfig(4)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"pipeline": {"stages": 2}},
        {"zero_optimization": {"offload_optimizer": {"pipeline": True, "pipeline_read": True, "cpu_pipeline": 1}}},
        {"wandb": {"project": "upipe"}},
    ],
)
def test_keys_of_deepspeeds_are_not_taken_for_ours(config):
    assert UPipeConfig.from_ds_config(config) is None


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(6, 6, 4), (6, 3, 4), (5, 1, 2), (32, 8, 4), (3, 3, 2), (28, 4, 8)]
)
def test_values_that_a_refusal_names_fit(heads, kv_heads, ranks):
    """Whatever chunk_heads is wrong; that such schedules attend as one process is tests/test_features.py's."""
    refused = 0
    for chunk_heads in range(1, heads + ranks + 1):
        try:
            UPipeConfig(chunk_heads).schedule(heads=heads, kv_heads=kv_heads, ranks=ranks)
        except ValueError as error:
            refused += 1
            named = re.search(r"Values that fit this model: ([\d, ]+)\.", str(error))
            for value in map(int, named[1].split(",")):
                UPipeConfig(value).schedule(heads=heads, kv_heads=kv_heads, ranks=ranks)
    assert refused


def test_fewer_ranks_is_the_remedy_where_there_are_more_than_heads():
    with pytest.raises(ValueError, match="Use fewer sequence-parallel ranks"):
        UPipeConfig(4).schedule(heads=3, kv_heads=3, ranks=4)
    assert UPipeConfig(2).schedule(heads=3, kv_heads=3, ranks=2).stages
