"""Every causal-LM family of the installed Transformers is served and equal to its own unpatched model, or refused.

One process group for all. docs/families.md is the outcome: ``UPIPE_WRITE_DOCS=1 pytest tests/test_every_family.py``
writes it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.attached import attached, sharded
from tests.losses import tiled
from tests.models import make_batch, worst
from tests.ranks import run_ranks
from tests.zoo import FAMILIES, LAYERS, VISION_LANGUAGE, VOCABULARY, tiny_model

# Lengths of packed documents: one, and three of which the second lies across the shards.
PACKINGS = ((16,), (3, 8, 5))
PAGE = Path(__file__).parents[1] / "docs" / "families.md"
HEAD = """# Families of Transformers, served and refused

Written by `UPIPE_WRITE_DOCS=1 pytest tests/test_every_family.py` with Transformers {version}; the same test fails when
this page is not true. It builds a small random model of every causal-LM family (windows shorter than the sequence,
softcap on, per-layer types mixed where the family mixes them) and attaches UPipe. What is served is run in float64 on 2
ranks, with one document and with packed ones: logits, loss and the gradient of every parameter equal those of the
unpatched model in one process, document by document, and loss and gradients of the tiled loss too. Everything else is
refused when the engine is built, with the reason given here.

Latent attention (MLA): the latents are computed and kept as the model does, heads are projected from them a stage at a
time. Where value heads are smaller than key heads, a GPU needs FlashAttention 3 or, without packed documents, PyTorch's
memory-efficient kernel ([supported.md](supported.md), "value heads of another size"), and `blocks` is refused. The
expected peak that is logged then counts value heads as large as key heads, for UPipe and Ulysses alike, and no latents:
for DeepSeek-V3 on 8 ranks at 1M tokens it says 7.2 GiB for `fused`, of 61.8 GiB; measured on fake tensors are 8.1 GiB,
2.0 GiB of them latents and what their norms keep, which any attention over them has.

"""
VISION = """
Text runs like that of the families above. Images: every rank runs the vision tower on all of them, as it stands
(`model.model.get_image_features`), takes its rows of the features (`upipe_integrations.sharding.shard_features`) and
passes them as `mm_encoder_outputs` beside its shard of `input_ids`. Positions of three components
(`model.model.get_rope_index`) are computed before sharding and go after the plain ones, `[4, batch, sequence]`:
`shard_batch` deals them so. `tests/test_vision_language.py` does all this, in float64, and at ZeRO 2 and 3 under
ALST's registration. A vision-language model whose tower has attention of another class is refused by that name.

"""


@dataclass(frozen=True)
class Outcome:
    """What became of a family: served, with its attention classes, memory modes and the largest error; or refused."""

    classes: str = ""
    modes: str = ""
    error: float = 0.0
    refusal: str = ""

    @property
    def reason(self) -> str:
        """The short form of the refusal."""
        unknown = re.search(r"UPipe does not serve: (.*?)\. docs/", self.refusal)
        return unknown.group(1) if unknown else re.sub(r"^upipe: | docs/.*", "", self.refusal)


def outcomes() -> dict[str, Outcome]:
    """Every family, on each rank of the default group."""
    from transformers.utils import logging

    from deepspeed_plugin.transformers.facts import find_attention

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    batch = make_batch(seq=16, vocab=VOCABULARY)
    results = {}
    for family in (*FAMILIES, *VISION_LANGUAGE):
        try:
            with torch.device("meta"):
                skeleton = tiny_model(family)
            attached(skeleton, 2, dist.group.WORLD)
        except ValueError as error:
            assert str(error).startswith("upipe: "), (family, error)
            results[family] = Outcome(refusal=str(error))
            continue
        model = tiny_model(family).double().eval()  # some routers add noise in training
        layers = find_attention(model).values()
        assert len(layers) == LAYERS, family
        wanted = _references(model, batch)
        without_logits = {name: t for name, t in wanted[0].items() if name != "logits"}
        errors, modes = [max(worst(tiled(model, batch, "mean"), without_logits).values())], "all"
        for chunk_heads, memory, packings in (
            (2, "keep", PACKINGS),
            (4, "fused", PACKINGS[1:]),
            (2, "blocks", PACKINGS[:1]),
        ):
            try:
                attachment = attached(model, chunk_heads, dist.group.WORLD, memory=memory)
            except ValueError as error:
                remedy = re.search(r"Set upipe.memory to '(fused|recompute)'", str(error))
                assert memory != "keep" and remedy, (family, error)
                modes = "`keep_heads`, `keep`, `recompute`" + (", `fused`" if remedy[1] == "fused" else "")
                continue
            for lengths, right in zip(PACKINGS, wanted, strict=True):
                if lengths not in packings:
                    continue
                positions = torch.cat([torch.arange(n) for n in lengths])[None]
                errors.append(max(worst(sharded(model, batch, dist.group.WORLD, positions), right).values()))
            attachment.undo()
        classes = ", ".join(sorted({f"`{type(layer).__name__}`" for layer in layers}))
        results[family] = Outcome(classes, modes, max(errors))
    return results


def _references(model, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Of each packing what one process computes, one rank taking one packing."""
    wanted: list[dict[str, torch.Tensor]] = [{}] * len(PACKINGS)
    assert dist.get_world_size() == len(PACKINGS)
    dist.all_gather_object(wanted, _one_process(model, batch, PACKINGS[dist.get_rank()]))
    return wanted


def _one_process(model, batch: dict[str, torch.Tensor], lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Like ``single_process``, each document run for itself: some families' plain masks ignore packing."""
    model.zero_grad(set_to_none=True)
    documents = batch["input_ids"].split(lengths, 1)
    logits = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in documents], 1)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "loss": loss.detach(), **grads}


@pytest.fixture(scope="module")
def found() -> dict[str, Outcome]:
    pytest.importorskip("deepspeed")
    first, second = run_ranks(2, outcomes, seconds=500)
    assert first == second
    return first


def test_no_family_is_silently_wrong(found):
    assert found.keys() == {*FAMILIES, *VISION_LANGUAGE}
    # float64 but for what Transformers itself computes in float32 (norms, routers, some rotary embeddings).
    assert {family: outcome.error for family, outcome in found.items() if outcome.error > 1e-5} == {}


def test_every_refusal_says_why(found):
    for family, outcome in found.items():
        if outcome.refusal:
            assert re.search(r"does not serve|not supported yet|no attention module that", outcome.refusal), family
            assert "Remove the 'upipe' key" in outcome.refusal, family
            # Plain Ulysses trains these to wrong gradients, as it exchanges nothing in such layers.
            runs_on = "runs along the sequence" in outcome.refusal or "layers of type" in outcome.refusal
            assert ("key and the sequence parallelism" in outcome.refusal) == runs_on, family


def test_every_served_class_is_in_a_family_that_was_run(found):
    from deepspeed_plugin.transformers.families import SERVED

    run = {name.strip("`") for outcome in found.values() for name in outcome.classes.split(", ") if name}
    modules = {name: name.rsplit(".", 1)[0] for name in SERVED}
    assert run == {name.rsplit(".", 1)[1] for name, module in modules.items() if _is_there(module)}


def _is_there(module: str) -> bool:
    """Whether the installed Transformers has the module: older ones lack some."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def test_the_page_is_what_a_run_finds(found):
    import transformers

    rows = {f: f"| {f} | {o.classes} | {o.modes} |" for f, o in sorted(found.items()) if not o.refusal}
    served = [row for f, row in rows.items() if f in FAMILIES]
    with_images = [row for f, row in rows.items() if f in VISION_LANGUAGE]
    refused = [f"| {f} | {o.reason} |" for f, o in sorted(found.items()) if o.refusal]
    head = ["| family | attention | memory modes |", "|---|---|---|"]
    page = HEAD.format(version=transformers.__version__)
    page += f"## Served: {len(served)}\n\n" + "\n".join([*head, *served])
    page += f"\n\n## Vision-language models served: {len(with_images)}\n" + VISION + "\n".join([*head, *with_images])
    page += f"\n\n## Refused: {len(refused)}\n\n" + "\n".join(["| family | why |", "|---|---|", *refused]) + "\n"
    if os.environ.get("UPIPE_WRITE_DOCS"):
        PAGE.write_text(page)
    if f"with Transformers {transformers.__version__};" not in PAGE.read_text():
        pytest.skip("docs/families.md was written with another version of Transformers")
    assert PAGE.read_text() == page, "run UPIPE_WRITE_DOCS=1 pytest tests/test_every_family.py and commit the page"
