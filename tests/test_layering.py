"""Who may import whom: the core knows no host, hosts do not know each other, one file calls collectives."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

BLOCKED_IMPORT = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"deepspeed", "megatron", "transformers", "accelerate", "wrapt", "flash_attn"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
import upipe_integrations, torch
w = [torch.randn(8, 6, requires_grad=True) for _ in range(3)]
p = upipe_integrations.AttentionProjections(
    *(upipe_integrations.Projection(upipe_integrations.Weights(t), 4) for t in w)
)
s = upipe_integrations.UPipeConfig(1).schedule(heads=2, kv_heads=2, ranks=1)
k = upipe_integrations.select_kernel("auto", upipe_integrations.KernelRequest(torch.device("cpu"), torch.float32, 4))
s = upipe_integrations.Staging(s, None, k)
upipe_integrations.upipe_attention(torch.randn(1, 5, 6), p, s).sum().backward()
assert all(t.grad is not None for t in w)
"""


def test_the_core_works_with_every_host_blocked():
    subprocess.run([sys.executable, "-c", BLOCKED_IMPORT], check=True, cwd=ROOT, timeout=120)


def test_importing_the_plugins_imports_no_host():
    code = (
        "import sys, deepspeed_plugin, megatron_patch; "
        "print([m for m in ('deepspeed', 'megatron', 'transformers', 'accelerate') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.stdout.strip() == "[]", result.stderr


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_one_file_of_the_core_calls_collectives():
    """Others start process groups, as launchers do, and call none of their collectives."""
    launchers = ("local_ranks", "proof/sharded", "proof/threads", "planning/measure")
    launchers += ("bench/on_ranks", "bench/job", "bench/peaks")
    users = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "upipe_integrations").rglob("*.py")
        if any(name.startswith("torch.distributed") for name in _imports(path))
    }
    assert users == {f"upipe_integrations/{name}.py" for name in ("all_to_all", *launchers)}
    used = {
        node.attr
        for name in launchers
        for node in ast.walk(ast.parse((ROOT / "upipe_integrations" / f"{name}.py").read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist"
    }
    lifetime = {"init_process_group", "is_initialized", "destroy_process_group"}
    assert used == {*lifetime, "HashStore", "get_rank", "get_world_size", "group"}


def test_hosts_do_not_know_each_other():
    for mine, other in (("deepspeed_plugin", "megatron"), ("megatron_patch", "deepspeed")):
        for path in (ROOT / mine).rglob("*.py"):
            assert not [name for name in _imports(path) if name.split(".")[0].startswith(other)], path
