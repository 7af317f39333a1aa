"""What holds of every subcommand of ``upipe``: help, wrong words, lengths, pipes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from upipe_integrations.commands import bench as bench_cli
from upipe_integrations.commands import check as check_cli
from upipe_integrations.commands import info as info_cli
from upipe_integrations.commands import main as cli

COMMANDS = {"plan": ["llama3-8b"], "check": ["llama3-8b"], "bench": ["llama3-8b"], "info": []}
OF_A_MODEL = ("plan", "check", "bench")
LENGTHS = {"plan": "--seq-len", "check": "--seq-len", "bench": "--tokens"}


def test_these_are_all():
    (commands,) = (action for action in cli._parser()._actions if hasattr(action, "choices") and action.choices)
    assert set(commands.choices) == set(COMMANDS)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_reads_well(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"] if command else ["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith(f"usage: upipe{f' {command}' if command else ''}")
    assert max(map(len, lines)) <= 100 and all(character.isprintable() for line in lines for character in line)
    assert "%(" not in text and "None" not in text
    if not command:
        assert all(name in text for name in COMMANDS)
    elif command in OF_A_MODEL:
        assert f"upipe {command} llama3-8b --ranks " in " ".join(text.split())  # an example
    # Every option says what it does: on its line, or (a long one) on the next.
    for number, line in enumerate(lines):
        if line.startswith("  -"):
            words = line.split("  ")
            assert len([word for word in words if word.strip()]) > 1 or lines[number + 1].startswith(" " * 10), line


def _refused(words: list[str], capsys) -> str:
    """The line that is said; exit status 2, and nothing on stdout."""
    try:
        status = cli.main(words)
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr()
    assert status == 2 and printed.out == "" and len(printed.err.splitlines()) == 1, printed
    assert printed.err.startswith("upipe")
    return printed.err


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_that_is_not_there(command, capsys):
    assert "--no-such-option" in _refused([command, *COMMANDS[command], "--no-such-option"], capsys)


@pytest.mark.parametrize("command", OF_A_MODEL)
def test_a_model_that_is_not_there(command, tmp_path, capsys):
    assert "the closest presets are llama3-8b" in _refused([command, "llama3-9b"], capsys)
    assert "presets are llama3-8b, " in _refused([command, "zzz"], capsys)
    assert "config.json: No such file or directory" in _refused([command, str(tmp_path)], capsys)
    config = tmp_path / "config.json"
    for content, message in (
        ("{", "is not JSON"),
        ("[]", "must be an object of settings"),
        ('{"text_config": 1}', "text_config = 1: must be an object"),
        ('{"num_attention_heads": 8, "vocab_size": 9}', "lacks "),
    ):
        config.write_text(content)
        said = _refused([command, str(tmp_path)], capsys)
        assert message in said
    assert "hidden_size" in said
    config.write_bytes(b"\xff\xfe\x00")
    assert "is not JSON" in _refused([command, str(config)], capsys)


@pytest.mark.parametrize("command", OF_A_MODEL)
@pytest.mark.parametrize("size", ["five", "-5M", "0", "1.0000001K", "5G", "1e6", "9" * 400, "0x10", "inf"])
def test_lengths_that_are_none(command, size, capsys):
    option = LENGTHS[command]
    assert f"{option} {size}: must be tokens such as 128K" in _refused(
        [command, "llama3-8b", f"{option}={size}"], capsys
    )


@pytest.mark.parametrize(
    ("size", "tokens"), [("5M", 5 << 20), ("5000000", 5_000_000), ("1.5k", 1536), ("128K", 1 << 17)]
)
def test_lengths(size, tokens, capsys):
    parse = cli._parser().parse_args
    assert cli.main(["plan", "llama3-8b", "--seq-len", size, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["tokens"] == tokens
    options = parse(["check", "llama3-8b", "--seq-len", size])
    assert {case.seq_len for case in check_cli._cases(options, check_cli._asked(options))} == {tokens}
    assert bench_cli._job(parse(["bench", "llama3-8b", "--tokens", size])).tokens == (tokens,)


@pytest.mark.parametrize("command", OF_A_MODEL)
def test_shapes_that_can_not_be(command, capsys):
    assert "ranks" in _refused([command, "llama3-8b", "--ranks", "0"], capsys)
    assert "-1" in _refused([command, "llama3-8b", "--ranks", "-1"], capsys)
    assert "'x'" in _refused([command, "llama3-8b", "--ranks", "x"], capsys)
    assert "32 query heads" in _refused([command, "llama3-8b", "--ranks", "64"], capsys)
    assert "chunk_heads = 64" in _refused([command, "llama3-8b", "--ranks", "8", "--chunk-heads", "64"], capsys)


def test_ctrl_c_and_a_reader_that_left(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(info_cli, "_kernels", lambda: interrupted(None))
    assert cli.main(["info", "--no-probe"]) == 130
    assert capsys.readouterr().err == "upipe info: interrupted\n"
    command = f"{sys.executable} -m upipe_integrations.commands.main plan llama3-8b | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert result.stderr == "" and result.returncode in (0, 1)


def test_info_in_a_pipe_says_what_is_on(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(["info", "--no-probe"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert all(character.isprintable() for line in printed.out.splitlines() for character in line)
    for row in ("upipe-integrations ", "torch ", "wrapt ", "autoload ", "kernels for cpu"):
        assert f"\n{row}" in f"\n{printed.out}"


class _Point:
    module, attr, name = "upipe_autoload", "deepspeed", "upipe_deepspeed"


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        ("print('noise'); print('patched: True')", "deepspeed is patched in a process that imports it"),
        ("print('patched: False')", "deepspeed is NOT patched where it is imported"),
        ("raise OSError('no libcuda')", "deepspeed can't be imported: OSError: no libcuda"),
        ("import time; time.sleep(60)", "deepspeed was not imported within 1 s"),
    ],
)
def test_info_tries_hosts_in_a_process_of_their_own(probe, said, monkeypatch):
    monkeypatch.setattr(info_cli.importlib.metadata, "entry_points", lambda group: [_Point()])
    monkeypatch.setattr(info_cli, "_find", lambda module: True)
    monkeypatch.setattr(info_cli, "_PROBE", probe)
    monkeypatch.setattr(info_cli, "_SECONDS", 1 if "sleep" in probe else 60)
    _, host, _ = info_cli._autoload(probe=True)
    assert host.endswith(said) and "entry point upipe_deepspeed, " in host
