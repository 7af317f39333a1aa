"""``upipe info``: versions, what turns UPipe on here and whether it does, and which kernels can run and why not."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

_PACKAGES = (
    "deepspeed", "transformers", "accelerate", "megatron-core", "flash-attn", "flash-attn-3", "flash-attn-4", "wrapt"
)  # fmt: skip


_HOST_MODULES = {"deepspeed": "deepspeed", "megatron": "megatron.core"}


_SECONDS = 120


# In a process of its own, as a training script is: what its `import torch` registers is what counts.
_PROBE = "import sys, torch, upipe_autoload; print('patched:', upipe_autoload.is_patched(sys.argv[1]))"


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """The subcommand's words."""
    parser = commands.add_parser(
        "info",
        help="versions, kernels and hosts on this machine",
        description="Versions of this package and of the hosts; whether a host's configuration alone turns UPipe on, "
        "tried in a process that imports the host; and the kernels that can run here, and why others can't.",
    )
    parser.add_argument("--no-probe", action="store_true", help="import no host: an answer in a second")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    import torch

    rows = [
        ("upipe-integrations", _version("upipe-integrations") or "not installed (running from a checkout)"),
        ("python", platform.python_version()),
        ("torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'not built in'})"),
        ("GPUs", ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "none"),
        *((package, _version(package) or "not installed") for package in _PACKAGES),
    ]
    print("\n".join(f"{name:20} {value}" for name, value in rows))
    print("\n".join(_autoload(probe=not options.no_probe)))
    print("\n".join(_kernels()))
    return 0


def _autoload(*, probe: bool) -> Iterator[str]:
    """Which hosts' configuration alone turns UPipe on, why it doesn't where it doesn't, and whether it is so."""
    points = [p for p in importlib.metadata.entry_points(group="torch.backends") if p.module == "upipe_autoload"]
    by_host = {point.attr: point.name for point in sorted(points, key=lambda point: point.attr)}
    hosts, off = ", ".join(by_host), "import the plugin in your script"
    turned_off = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1"  # PyTorch's own rule
    if not by_host:
        state = f"off: PyTorch finds no entry point of this project (not installed); {off}"
    elif turned_off:
        state = f"off for {hosts}: TORCH_DEVICE_BACKEND_AUTOLOAD is set; {off}"
    elif importlib.util.find_spec("wrapt") is None:
        state = f"off for {hosts}: wrapt is not installed"
    else:
        state = f"on for {hosts}: configuration is enough"
    yield f"{'autoload':20} {state}"
    registered = "loaded" if "upipe_autoload" in sys.modules else "not loaded"
    found = {host: _find(module) for host, module in _HOST_MODULES.items()}
    probes = {host: _start_probe(host) for host in by_host if probe and found.get(host)}
    for host, name in by_host.items():
        said = "is not installed" if not found.get(host) else "not tried (--no-probe)"
        if host in probes:
            said = _answer(probes[host])
        yield f"  {host:18} entry point {name}, {registered} by `import torch`; {host} {said}"
    if by_host:
        yield f"  {'to turn it off':18} TORCH_DEVICE_BACKEND_AUTOLOAD=0, or deepspeed_plugin.unregister() in a script"


def _find(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _start_probe(host: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _PROBE, host]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _answer(process: subprocess.Popen[str]) -> str:
    """What a probe found, or the last thing it said."""
    try:
        out, err = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"was not imported within {_SECONDS} s"
    answers = [line.removeprefix("patched: ") for line in out.splitlines() if line.startswith("patched: ")]
    if process.returncode or not answers:
        return f"can't be imported: {(err.strip().splitlines() or ['no reason given'])[-1]}"
    return "is patched in a process that imports it" if answers[0] == "True" else "is NOT patched where it is imported"


def _kernels() -> Iterator[str]:
    import torch

    from upipe_integrations.kernels import KernelRequest, order_of_preference, select_kernel

    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        request = KernelRequest(torch.device(device), dtype, 128)
        yield f"\nkernels for {device}, {str(dtype).removeprefix('torch.')}, heads of 128, the first that can is taken:"
        no_gpu = "no GPU here" if device == "cuda" and not torch.cuda.device_count() else None
        for kernel in order_of_preference(request.device):
            reason = kernel.refusal(request) or no_gpu
            yield f"  {kernel.name:18} {'no: ' + reason if reason else 'yes'}"
        if no_gpu is None:
            yield f"  auto takes {select_kernel('auto', request).name}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
