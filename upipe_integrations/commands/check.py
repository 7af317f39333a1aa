"""``upipe check``: attention layers, of sizes or of a model, proven on ranks of this machine.

A model's layers are run as they are but for what makes them slow (``reduced`` below): the heads, and with them the
schedule and who exchanges what with whom, are the model's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upipe_integrations.commands.parsing import (
    add_dtype,
    add_kernel,
    add_model,
    add_number,
    add_stage_settings,
    tokens,
    words,
)
from upipe_integrations.config import UPipeConfig
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning.models import PRESETS, Attention, ModelConfig, find_config

if TYPE_CHECKING:
    from upipe_integrations.proof.case import Case
    from upipe_integrations.proof.check import Result


_LAYOUTS = ("contiguous", "zigzag", "packed-zigzag")


_SERVES = "upipe.serves"
"""Entry points of hosts: ``function(fields, settings, ranks)`` says what of a Transformers config it would replace, or
raises ValueError (refused) or ImportError (the host is not installed)."""


# Of a model's layer: rows of a rank and hidden size. Windows are cut so that they still end within the sequence.
_ROWS, _HIDDEN = 32, 128


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """The subcommand's words."""
    parser = commands.add_parser(
        "check",
        help="prove attention layers on several ranks against one process",
        usage="upipe check MODEL [options]\n       upipe check --heads N [options]",
        description="Start the ranks here, run an attention layer forward and backward through UPipe, and compare its "
        "output and every gradient with plain attention in one process in float64. Of a MODEL, every kind of attention "
        "layer that its config tells (heads, windows, softcap, scale, sinks, biases, norms per head) in every memory "
        "mode, on a short sequence; its own rotary scaling and output gates are not in it. Exit status: 0 when all "
        "agree, 1 when one does not, 2 for wrong input.",
        epilog="examples: upipe check llama3-8b --ranks 4 --ds-config ds.json; upipe check --heads 6 --kv-heads 3 "
        "--head-dim 16 --seq-len 64 --ranks 4 --chunk-heads 4; upipe check --heads 6 --kv-heads 3 --window 9 "
        f"--memory fused. Presets: {', '.join(PRESETS)}.",
    )
    add_model(parser, required=False)
    parser.add_argument("--ds-config", metavar="FILE", help="a ds_config, for the settings of its upipe block")
    layer = parser.add_argument_group("layer (a MODEL has its own)")
    add_number(layer, "--heads", "query heads over all ranks")
    add_number(layer, "--kv-heads", "KV heads over all ranks (default: as --heads)")
    add_number(layer, "--head-dim", "size of a head (default: 64)")
    add_number(layer, "--value-dim", "size of a value head (default: as --head-dim)")
    layer.add_argument("--bias", action="store_true", help="q, k, v biases")
    layer.add_argument("--norm", action="store_true", help="a norm per query and key head")
    add_number(layer, "--window", "sliding window: a token sees itself and N-1 before it")
    layer.add_argument("--softcap", type=float, metavar="X", help="scores are capped at X by tanh")
    layer.add_argument("--scale", type=float, metavar="X", help="factor on scores (default: head_dim ** -0.5)")
    layer.add_argument("--sinks", action="store_true", help="one sink logit per query head")
    layer.add_argument("--full", action="store_true", help="full instead of causal attention")
    tensors = parser.add_argument_group("input")
    tensors.add_argument("--seq-len", metavar="N", help=f"tokens (default: 256; of a MODEL {_ROWS} per rank)")
    add_number(tensors, "--hidden", f"hidden size (default: of a MODEL {_HIDDEN})")
    add_number(tensors, "--batch", "batch rows (default: %(default)s)", default=1)
    tensors.add_argument("--packed", metavar="A,B,...", help="lengths of packed documents, or one number of equal ones")
    add_number(tensors, "--seed", "of the random tensors (default: %(default)s)", default=0)
    how = parser.add_argument_group("how it runs (words here go before those of --ds-config)")
    add_number(how, "--ranks", "ranks to start (default: the ds_config's, else 2)")
    add_number(how, "--chunk-heads", "query heads per stage (default: as --ranks)")
    add_kernel(how)
    how.add_argument(
        "--memory", metavar="A,B", help=f"what is kept: {', '.join(MEMORY)} (default: keep; of a MODEL all)"
    )
    add_stage_settings(how, "of memory blocks (default: 4)")
    how.add_argument("--partial", action="store_true", help="the form for heads that are projected already")
    how.add_argument("--layout", choices=_LAYOUTS, default="contiguous", help="rows of a rank (default: %(default)s)")
    add_dtype(how, "default: float64 on CPUs, bfloat16 on GPUs")
    how.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where every rank finds a GPU")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    asked = _asked(options)
    cases = list(_cases(options, asked))
    print("\n".join(_headline(options, asked, cases)), flush=True)
    try:
        agree = _by_tensor(cases[0]) if asked.model is None and len(cases) == 1 else _by_case(asked, cases)
    except RuntimeError as error:
        print(f"upipe check: {error}", file=sys.stderr)
        return 1
    return 0 if agree else 1


@dataclass(frozen=True)
class _Asked:
    """The options, read: a model or None, its attention, and the settings in each memory mode.

    ``named`` is whether the memory modes were named: what was not asked for by name may be refused.
    """

    model: ModelConfig | None
    layers: tuple[Attention, ...]
    settings: tuple[UPipeConfig, ...]
    named: bool
    ranks: int
    ds_ranks: int | None


def _asked(options: argparse.Namespace) -> _Asked:
    """Raises ValueError for words that do not go together, and for a ds_config or model that can't be read."""
    if (options.model is None) == (options.heads is None):
        raise ValueError("needs a MODEL or --heads, and not both: upipe check llama3-8b, or upipe check --heads 8.")
    config = None if options.model is None else find_config(options.model)
    layers = (_layer(options),) if config is None else _layers_of(config, options)
    block, ds_ranks = ({}, None) if options.ds_config is None else _read_ds_config(options.ds_config)
    ranks = next(n for n in (options.ranks, ds_ranks, 2) if n is not None)
    if ranks < 1:
        raise ValueError(f"ranks = {ranks}: must be positive.")
    given = {name: getattr(options, name) for name in ("chunk_heads", "kernel", "query_blocks", "accumulate")}
    block = {"chunk_heads": ranks} | block | {name: value for name, value in given.items() if value is not None}
    if options.overlap:
        block["overlap"] = options.overlap
    named = options.memory is not None or options.ds_config is not None or config is None or options.partial
    modes: Sequence[str] = words(options.memory) if options.memory else (block.get("memory", UPipeConfig.memory),)
    settings = tuple(UPipeConfig.from_mapping({**block, "memory": mode}) for mode in (modes if named else MEMORY))
    return _Asked(config, layers, settings, named, ranks, ds_ranks)


def _layer(options: argparse.Namespace) -> Attention:
    """The layer of the sizes that were given; what is not given is a Case's default."""
    head_dim = 64 if options.head_dim is None else options.head_dim
    return Attention(
        heads=options.heads,
        kv_heads=options.heads if options.kv_heads is None else options.kv_heads,
        head_dim=head_dim,
        hidden_size=head_dim * max(2, options.heads // 2) if options.hidden is None else options.hidden,
        window=options.window,
        softcap=options.softcap,
        scale=options.scale,
        sinks=options.sinks,
        bias=options.bias,
        norm=options.norm,
    )


def _layers_of(config: ModelConfig, options: argparse.Namespace) -> tuple[Attention, ...]:
    for name in ("kv_heads", "head_dim", "value_dim", "bias", "norm", "window", "softcap", "scale", "sinks", "full"):
        if getattr(options, name) not in (None, False):
            raise ValueError(
                f"--{name.replace('_', '-')} with a MODEL, which has its own layers: leave it out, or give --heads."
            )
    return config.attention()


def _read_ds_config(file: str) -> tuple[dict[str, Any], int | None]:
    """The ``upipe`` settings of a ds_config, as DeepSpeed reads the file, and its sequence-parallel ranks."""
    try:
        config = _json_or_hjson(Path(file).read_text())
    except OSError as error:
        raise ValueError(f"--ds-config {file}: {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"--ds-config {file}: is not JSON: {' '.join(str(error).split())}.") from None
    if not isinstance(config, Mapping):
        raise ValueError(f"--ds-config {file}: must be an object of settings.")
    settings = UPipeConfig.from_ds_config(config)
    if settings is None:
        raise ValueError(f'--ds-config {file}: has no key \'upipe\'. Add "upipe": {{"chunk_heads": 8}}.')
    ranks = config.get("sequence_parallel_size")
    if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
        raise ValueError(f"--ds-config {file}: sequence_parallel_size = {ranks!r}: must be a positive integer.")
    return dataclasses.asdict(settings), ranks


def _json_or_hjson(text: str) -> Any:
    """DeepSpeed reads Hjson (comments, no need of quotes) and refuses a key that stands twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number])]
        if twice:
            raise ValueError(f"key {twice[0]!r} stands twice")
        return dict(pairs)

    try:
        import hjson
    except ImportError:
        return json.loads(text, object_pairs_hook=once)
    return hjson.loads(text, object_pairs_hook=once)


def _cases(options: argparse.Namespace, asked: _Asked) -> Iterator[Case]:
    """A case per kind of layer and memory mode; raises ValueError."""
    import torch

    from upipe_integrations.kernels import AttentionSpec
    from upipe_integrations.layout import Layout
    from upipe_integrations.proof.case import Case

    seq_len = _seq_len(options, asked)
    documents = _documents(options.packed, seq_len)
    if options.layout == "packed-zigzag" and documents is None:
        raise ValueError("--layout packed-zigzag: needs --packed, the lengths of the documents.")
    layout = {
        "contiguous": Layout.contiguous(),
        "zigzag": Layout.zigzag(),
        "packed-zigzag": Layout.packed_zigzag(documents or (0, seq_len)),
    }[options.layout]
    device = options.device or ("cuda" if asked.ranks <= torch.cuda.device_count() else "cpu")
    for layer in asked.layers:
        for settings in asked.settings:
            yield Case(
                heads=layer.heads,
                kv_heads=layer.kv_heads,
                head_dim=layer.head_dim,
                seq_len=seq_len,
                ranks=asked.ranks,
                **dataclasses.asdict(settings),
                hidden_size=_hidden(options, asked, layer),
                value_dim=options.value_dim,
                batch=options.batch,
                dtype=getattr(torch, options.dtype or ("bfloat16" if device == "cuda" else "float64")),
                device=device,
                spec=AttentionSpec(
                    causal=not options.full,
                    scale=layer.scale,
                    window=_window(asked, layer, seq_len),
                    softcap=layer.softcap,
                    documents=None if documents is None else (documents,),
                ),
                layout=layout,
                sinks=layer.sinks,
                bias=layer.bias,
                norm=layer.norm,
                partial=options.partial,
                seed=options.seed,
            )


def _seq_len(options: argparse.Namespace, asked: _Asked) -> int:
    if options.seq_len is not None:
        return tokens("--seq-len", options.seq_len)
    if asked.model is None:
        return 256
    step = 2 * asked.settings[0].query_blocks  # what blocks and zigzag layouts must divide
    return asked.ranks * -(-_ROWS // step) * step


def _hidden(options: argparse.Namespace, asked: _Asked, layer: Attention) -> int:
    if options.hidden is not None or asked.model is None:
        return layer.hidden_size if options.hidden is None else int(options.hidden)
    return min(layer.hidden_size, _HIDDEN)


def _window(asked: _Asked, layer: Attention, seq_len: int) -> int | None:
    if asked.model is None or layer.window is None:
        return layer.window
    return min(layer.window, seq_len // 4 + 1)


def _documents(packed: str | None, seq_len: int) -> tuple[int, ...] | None:
    """Boundaries from ``--packed``."""
    if packed is None:
        return None
    try:
        lengths = [int(part) for part in packed.split(",")]
    except ValueError:
        raise ValueError(f"--packed {packed}: must be lengths such as 10,20,34, or one number.") from None
    if len(lengths) == 1:
        count = lengths[0]
        if count < 1 or seq_len % count:
            raise ValueError(f"--packed {packed}: the number of equal documents must divide the {seq_len} tokens.")
        lengths = [seq_len // count] * count
    if min(lengths) < 1 or sum(lengths) != seq_len:
        raise ValueError(f"--packed {packed}: lengths must be positive and add up to the {seq_len} tokens.")
    return tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))


def _headline(options: argparse.Namespace, asked: _Asked, cases: list[Case]) -> Iterator[str]:
    """What runs, and of a model what was reduced."""
    from upipe_integrations.kernels import select_kernel

    case = cases[0]
    kernels = dict.fromkeys(select_kernel(c.kernel, c.request()).name for c in cases)
    features = ", ".join(dict.fromkeys(feature for c in cases for feature in c.request().features()))
    if asked.model is not None:
        yield asked.model.name
    yield (
        f"{case.heads} query and {case.kv_heads} KV heads of {case.head_dim}, {case.batch} x {case.seq_len} tokens, "
        f"{case.ranks} ranks, {len(case.schedule().stages)} stages of {case.chunk_heads} heads; kernel "
        f"{', '.join(kernels)}, memory {', '.join(settings.memory for settings in asked.settings)}, {options.layout} "
        f"layout, {str(case.dtype).removeprefix('torch.')} on {case.device}"
        f"{f'; {features}' if features else ''}"
    )
    if asked.model is not None:
        reduced = [f"{case.seq_len} tokens"]
        if case.hidden_size != asked.layers[0].hidden_size:
            reduced.append(f"hidden size {case.hidden_size} of {asked.layers[0].hidden_size}")
        windows = {layer.window: _window(asked, layer, case.seq_len) for layer in asked.layers}
        reduced += [f"window {ours} of {theirs}" for theirs, ours in windows.items() if ours != theirs]
        yield f"reduced to take seconds: {', '.join(reduced)}"
    if asked.ds_ranks not in (None, asked.ranks):
        yield f"{options.ds_config} is for {asked.ds_ranks} ranks (sequence_parallel_size), these are {asked.ranks}"


def _by_tensor(case: Case) -> bool:
    """A line per tensor of one case, and the verdict."""
    from upipe_integrations.proof.check import check

    findings = check(case)
    width = max(6, *(len(finding.tensor) for finding in findings))
    print(f"{'tensor':{width}}  largest error  tolerance")
    for f in findings:
        print(f"{f.tensor:{width}}  {f.error:13.1e}  {f.tolerance:9.0e}  {'ok' if f.agrees else 'DIFFERS'}")
    wrong = [finding.tensor for finding in findings if not finding.agrees]
    print(
        f"DIFFERS: {', '.join(wrong)}"
        if wrong
        else f"ok: the output and {len(findings) - 1} gradients agree with one process"
    )
    return not wrong


def _by_case(asked: _Asked, cases: list[Case]) -> bool:
    """A line per case, what hosts say of the model, and the verdict."""
    from upipe_integrations.proof.check import check_all

    names = [f"memory {case.memory}, {_kind(case)}" for case in cases]
    width = max(5, *map(len, names))
    print(f"{'check':{width}}  tensors  largest error        tolerance")
    wrong, proven = [], 0
    for case, name, result in zip(cases, names, check_all(cases), strict=True):
        print(f"{name:{width}}  {_outcome(result)}", flush=True)
        if result.refusal is not None and asked.named:
            raise ValueError(f"memory {case.memory}: {result.refusal}")
        proven += result.refusal is None
        wrong += [f"{name} ({f.tensor})" for f in result.findings if not f.agrees]
    for line in _hosts(asked):
        print(line)
    checks = "1 check agree" if proven == 1 else f"{proven} checks agree"
    print(f"DIFFERS: {'; '.join(wrong)}" if wrong else f"ok: output and every gradient of {checks} with one process")
    return not wrong


def _kind(case: Case) -> str:
    if case.spec.window is not None:
        return f"window {case.spec.window}"
    return "causal" if case.spec.causal else "full"


def _outcome(result: Result) -> str:
    if result.refusal is not None:
        return f"not served: {result.refusal}"
    worst, verdict = result.worst, "ok" if all(finding.agrees for finding in result.findings) else "DIFFERS"
    where = f"({worst.tensor})"
    return f"{len(result.findings):7}  {worst.error:13.1e} {where:8}{worst.tolerance:8.0e}  {verdict}"


def _hosts(asked: _Asked) -> Iterator[str]:
    """What the plugins that are installed say of a model: asked through their entry points, as they know the hosts."""
    if asked.model is None:
        return
    points = sorted(importlib.metadata.entry_points(group=_SERVES), key=lambda point: point.name)
    if not points:
        yield "plugins: not asked, as this project is not installed (a checkout: pip install -e .)"
    for point in points:
        try:
            said = point.load()(asked.model.fields, asked.settings, asked.ranks)
        except ImportError as error:
            said = f"not asked: {error}"
        except ValueError as error:
            said = f"REFUSES this model: {error}"
        yield f"{point.name}: {said}"
