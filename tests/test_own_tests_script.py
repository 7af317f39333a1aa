"""``scripts/deepspeed_own_tests.py`` on a folder that looks like a checkout of DeepSpeed.

What DeepSpeed's own tests give is in docs/deepspeed_tests.md.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
_PATH = Path(__file__).parents[1] / "scripts" / "deepspeed_own_tests.py"
_SPEC = importlib.util.spec_from_file_location("deepspeed_own_tests", _PATH)
script = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(script)

TESTS = f"""
import sys
from pathlib import Path
import pytest

def test_always():
    assert Path("{script.HUB_MODEL}", "config.json").exists()

def test_never():
    raise NotImplementedError("no such device")

def test_skipped():
    pytest.skip("later")

def test_without_the_plugin():
    assert "upipe_autoload" not in sys.modules

def test_without_the_key():
    assert "deepspeed_own_tests" not in sys.modules
"""


@pytest.mark.parametrize("arguments", [[], ["--verbose"]])
def test_a_checkout_is_needed(arguments, capsys):
    assert script.main(arguments) == 2
    assert "deepspeed_own_tests.py CHECKOUT" in capsys.readouterr().out


def test_a_folder_that_is_no_checkout_is_refused(tmp_path, capsys):
    assert script.main([str(tmp_path)]) == 2
    assert f"CHECKOUT = {tmp_path}: has no tests/unit/ulysses_alst" in capsys.readouterr().err


def test_the_table_has_each_test_and_what_got_worse_fails_the_run(tmp_path, capsys):
    folder = tmp_path / script.TESTS
    folder.mkdir(parents=True)
    (folder / "test_fake.py").write_text(TESTS)
    before = sorted(tmp_path.rglob("*"))
    assert script.main([str(tmp_path)]) == 1
    printed = capsys.readouterr()
    never = "fails: NotImplementedError: no such device"
    for row in [
        "| test | DeepSpeed alone | plugin | plugin and key |",
        "| `test_fake::test_always` | passes | passes | passes |",
        f"| `test_fake::test_never` | {never} | {never} | {never} |",
        "| `test_fake::test_skipped` | skipped: later | skipped: later | skipped: later |",
    ]:
        assert row in printed.out.splitlines()
    assert printed.err.count("passes without the plugin") == 3
    assert "test_fake::test_without_the_plugin passes without the plugin; plugin: fails" in printed.err
    assert "test_fake::test_without_the_key passes without the plugin; plugin and key: fails" in printed.err
    assert sorted(tmp_path.rglob("*")) == before  # the checkout is only read
    # All of it, without what got worse.
    assert script.main([str(tmp_path), "-k", "not without"]) == 0


def test_the_key_goes_to_sequence_parallel_engines_alone(tmp_path):
    log = tmp_path / "engines"
    mpu = SimpleNamespace(get_sequence_parallel_world_size=lambda: 4)
    upipe = SimpleNamespace(summary="2 layers")

    def initialize(config, mpu, upipe):
        return SimpleNamespace(config=config, upipe=upipe), None

    def run(**given):
        return script.initialize_with_key(str(log), initialize, None, (), {"config": {"a": 1}, **given})[0]

    assert run(mpu=None, upipe=None).config == {"a": 1}
    assert not log.exists()
    assert run(mpu=mpu, upipe=upipe).config == {"a": 1, "upipe": {"chunk_heads": 4}}
    assert log.read_text() == "2 layers\n"
    with pytest.raises(AssertionError, match="UPipe is not on"):
        run(mpu=mpu, upipe=None)
