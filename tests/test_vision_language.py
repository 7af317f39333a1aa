"""Vision-language models: images in the sequence, positions of three components, a vision tower that is left alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.attached import attached
from tests.engines import UPIPE, ds_config, forget_ulysses, gradients, make_engine, register_ulysses
from tests.models import worst
from tests.ranks import run_ranks
from tests.zoo import IMAGE_TOKEN, VISION_LANGUAGE, tiny_model
from upipe_integrations.sharding import shard_batch, shard_features

# Two rows of 16 tokens; the second image of the first row lies across the shards of two ranks.
_IMAGES = ((2, 7), (1, 9))
_TOKENS_OF_IMAGE = 4
_QWEN = {"qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"}


def make_batch(model, family: str) -> dict[str, torch.Tensor]:
    """Token ids with placeholders, labels and, where the family has them, positions of three components."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, IMAGE_TOKEN, (2, 16), generator=generator)
    for row, starts in enumerate(_IMAGES):
        for start in starts:
            ids[row, start : start + _tokens_of_image(family)] = IMAGE_TOKEN
    plain = torch.arange(16).expand(2, 16)
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE_TOKEN, -100), "position_ids": plain}
    if family in _QWEN:
        grid = torch.tensor([[1, 4, 4]] * 4)
        own, _ = model.model.get_rope_index(ids, (ids == IMAGE_TOKEN).int(), image_grid_thw=grid)
        assert not torch.equal(own[0], own[2])
        batch["position_ids"] = torch.cat([plain[None], own])
    return batch


def _tokens_of_image(family: str) -> int:
    return 1 if family in ("internvl", "mistral3") else _TOKENS_OF_IMAGE


def features_of(model, family: str):
    """What the vision tower makes of four images, which differ."""
    generator = torch.Generator().manual_seed(4)
    dtype = model.get_input_embeddings().weight.dtype
    if family in _QWEN:
        grid = torch.tensor([[1, 4, 4]] * 4)
        pixels = torch.randn(4 * 16, 3 * 4 * 4, generator=generator).to(dtype)
        return model.model.get_image_features(pixels, grid)
    pixels = torch.randn(4, 3, 8, 8, generator=generator).to(dtype)
    sizes = {"image_sizes": torch.tensor([[8, 8]] * 4)} if family == "mistral3" else {}
    return model.model.get_image_features(pixels, **sizes)


def whole(features) -> torch.Tensor:
    """`[N, E]` of the features of several images."""
    return torch.cat([t.flatten(0, -2) for t in features])


def loss_of(model, batch: dict[str, torch.Tensor], outputs, labels: torch.Tensor, count: int) -> torch.Tensor:
    """This shard's part of the mean loss, of features that were computed before."""
    given = {name: batch[name] for name in ("input_ids", "position_ids")}
    logits = model(**given, mm_encoder_outputs={"image": outputs}, use_cache=False).logits
    flat = logits.flatten(0, 1), labels.flatten()
    return torch.nn.functional.cross_entropy(*flat, ignore_index=-100, reduction="sum") / count


def grads_of(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def one_process(model, family: str) -> tuple[dict[str, torch.Tensor], int]:
    model.zero_grad(set_to_none=True)
    batch = make_batch(model, family)
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    count = int((labels != -100).sum())
    loss = loss_of(model, batch, features_of(model, family), labels, count)
    loss.backward()
    return {"loss": loss.detach(), **grads_of(model)}, count


def on_shards(model, family: str, count: int, group) -> torch.Tensor:
    """This rank's part of the loss."""
    batch = make_batch(model, family)
    outputs = features_of(model, family)

    def mine(features) -> torch.Tensor:
        return shard_features(whole(features), batch["input_ids"], IMAGE_TOKEN, group)

    of_images = outputs.pooler_output
    outputs.pooler_output = mine(of_images) if isinstance(of_images, torch.Tensor) else [mine(of_images)]
    if "deepstack_features" in outputs:
        outputs.deepstack_features = [[mine([t])] for t in map(whole, outputs.deepstack_features)]
    shard = shard_batch(batch, group)
    return loss_of(model, shard, outputs, shard["shift_labels"], count)


def _errors() -> dict[str, float]:
    group = dist.group.WORLD
    errors = {}
    for family in VISION_LANGUAGE:
        model = tiny_model(family).double().eval()
        wanted, count = one_process(model, family)
        assert any("vision" in name or "visual" in name for name in wanted), family
        for memory in ("keep", "blocks") if family == "qwen3_vl" else ("keep",):
            attachment = attached(model, 4, group, memory=memory)
            model.zero_grad(set_to_none=True)
            loss = on_shards(model, family, count, group)
            loss.backward()
            got = {"loss": loss.detach().clone(), **grads_of(model)}
            for t in got.values():
                dist.all_reduce(t)
            errors[f"{family}, {memory}"] = largest_error(got, wanted)
            attachment.undo()
    return errors


def largest_error(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """A key's bias moves no softmax (CLIP has one): its gradient is rounding alone, and must be here too."""
    nothing = {name for name in wanted if name.endswith("k_proj.bias") and "vision" in name}
    assert all(float(t.abs().max()) < 1e-5 for results in (got, wanted) for t in map(results.get, nothing))
    return max(worst(*({k: v for k, v in r.items() if k not in nothing} for r in (got, wanted))).values())


def test_images_in_the_sequence():
    """Public fault 16: loss and every gradient, the vision tower's too."""
    for errors in run_ranks(2, _errors):
        assert len(errors) == len(VISION_LANGUAGE) + 1
        # float64 but for what Transformers itself computes in float32.
        assert {case: error for case, error in errors.items() if error > 1e-5} == {}


def _in_engines() -> dict[str, object]:
    """Under ALST's registration, which takes the vision tower's attention for the text's: at ZeRO 2 and 3."""
    from deepspeed_plugin import group_mean_loss, sequence_parallel_loss

    family = "qwen2_5_vl"
    results: dict[str, object] = {}
    forget_ulysses()
    model = tiny_model(family)
    model.set_attn_implementation("sdpa")
    wanted, _ = one_process(model, family)
    model.zero_grad(set_to_none=True)
    for stage in (2, 3):
        model = tiny_model(family)
        model.set_attn_implementation("sdpa")
        batch = make_batch(model, family)
        engine = make_engine(model, ds_config(stage, **UPIPE), register_ulysses(model, 2))
        outputs = features_of(model, family)
        group = dist.group.WORLD
        features = shard_features(whole(outputs.pooler_output), batch["input_ids"], IMAGE_TOKEN, group)
        outputs.pooler_output = [features]
        shard = shard_batch(batch, group)
        given = {name: shard[name] for name in ("input_ids", "position_ids")}
        logits = engine(**given, mm_encoder_outputs={"image": outputs}, use_cache=False).logits
        loss = sequence_parallel_loss(engine, logits, shard["shift_labels"])
        engine.backward(loss)
        got = {"loss": group_mean_loss(engine, loss), **gradients(engine)}
        results[f"stage {stage}"] = largest_error(got, wanted)
        three = {**given, "position_ids": given["position_ids"][1:]}
        try:
            engine(**three, use_cache=False)
        except ValueError as error:
            results["three"] = str(error)
        try:
            plain = {**given, "position_ids": given["position_ids"][0]}
            engine(**plain, mm_encoder_outputs={"image": outputs}, use_cache=False)
        except ValueError as error:
            results["plain"] = str(error)
        engine.upipe.undo()
        results["clean"] = not any("forward" in vars(m) for m in model.modules() if "Attention" in type(m).__name__)
        engine.destroy()
    return results


def test_images_under_alst():
    for results in run_ranks(2, _in_engines):
        assert results["stage 2"] < 2e-5 and results["stage 3"] < 2e-5, results
        assert "a model whose positions have three components" in str(results["three"]).lower()
        assert "mm_encoder_outputs and position_ids of shape (2, 8), without the components" in str(results["plain"])
        assert results["clean"]


def _features() -> tuple[list[int], str]:
    ids = torch.tensor([[7, 0, 0, 1, 0, 1, 1, 0], [0, 1, 1, 0, 1, 1, 1, 0]])
    rows = torch.arange(7)[:, None]
    mine = shard_features(rows, ids, 0, dist.group.WORLD)
    try:
        shard_features(rows, ids[:, :4], 0, dist.group.WORLD)
    except ValueError as error:
        return mine.flatten().tolist(), str(error)
    return mine.flatten().tolist(), "accepted"


def test_features_follow_their_placeholders():
    (first, message), (second, _) = run_ranks(2, _features)
    assert (first, second) == ([0, 1, 4, 5], [2, 3, 6]) and "tokens 0 in input_ids of shape (2, 4)" in message


def test_positions_without_plain_ones_are_refused():
    batch = {"input_ids": torch.zeros(2, 8), "position_ids": torch.zeros(3, 2, 8)}
    with pytest.raises(ValueError, match=r"position_ids of shape \(3, 2, 8\): must be .* \[4, batch, sequence\]"):
        shard_batch(batch, None)


def test_other_vision_towers_are_refused_by_name():
    """Gemma 3 lets the tokens of an image see each other, which is not causal attention."""
    import transformers

    with torch.device("meta"):
        config = transformers.Gemma3Config(text_config={"num_hidden_layers": 1}, vision_config={"num_hidden_layers": 1})
        model = transformers.Gemma3ForConditionalGeneration(config)
    with pytest.raises(ValueError, match=r"does not serve: .*SiglipAttention \(no test compares"):
        attached(model, 4)
