"""``scripts/release_contents.py`` finds what is wrong with a build; ``release_check.sh`` itself builds and installs."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("packaging")
ROOT = Path(__file__).parents[1]


def _script():
    spec = importlib.util.spec_from_file_location("release_contents", ROOT / "scripts" / "release_contents.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


contents = _script()
VERSION = __import__("upipe_integrations").__version__


def _built(folder: Path, *, without: str = "", beside: str = "", points: str | None = None, version: str = VERSION):
    """A wheel and an sdist with what they must have, but for what is asked."""
    info = f"upipe_integrations-{version}.dist-info"
    names = [p.relative_to(ROOT).as_posix() for package in contents.PACKAGES for p in (ROOT / package).rglob("*.py")]
    names += [
        *(f"{package}/py.typed" for package in contents.PACKAGES),
        "upipe_autoload.py",
        f"{info}/licenses/LICENSE",
    ]
    with zipfile.ZipFile(folder / f"upipe_integrations-{version}-py3-none-any.whl", "w") as wheel:
        for name in (set(names) | {beside}) - {without, ""}:
            wheel.writestr(name, "")
        wheel.writestr(f"{info}/entry_points.txt", "\n".join(contents.ENTRY_POINTS) if points is None else points)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.4\nName: x\n\n# upipe-integrations\n")
    with tarfile.open(folder / f"upipe_integrations-{version}.tar.gz", "w:gz") as sdist:
        for name in {"pyproject.toml", "README.md", "LICENSE"} - {without}:
            sdist.addfile(tarfile.TarInfo(f"upipe_integrations-{version}/{name}"), io.BytesIO())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"without": "deepspeed_plugin/py.typed"}, "the wheel lacks deepspeed_plugin/py.typed"),
        ({"without": "upipe_autoload.py"}, "the wheel lacks upipe_autoload.py"),
        ({"without": "upipe_integrations/bench/on_ranks.py"}, "the wheel lacks upipe_integrations/bench/on_ranks.py"),
        ({"beside": "tests/test_cli.py"}, "the wheel has tests/test_cli.py, which no import needs"),
        ({"points": ""}, "the wheel lacks the entry point upipe = upipe_integrations.commands.main:main"),
        ({"without": "README.md"}, "the sdist lacks README.md"),
        ({"version": "9.9.9"}, "built {'9.9.9'}, __version__ = "),
    ],
)
def test_a_fault_is_found(fault, message, tmp_path):
    _built(tmp_path)
    assert contents.faults(tmp_path) == []
    for file in tmp_path.iterdir():
        file.unlink()
    _built(tmp_path, **fault)
    assert any(said.startswith(message) for said in contents.faults(tmp_path))


@pytest.mark.parametrize(
    ("headings", "faults"),
    [
        (["Unreleased"], []),
        ([VERSION], []),
        (["Unreleased", "0.0.1"], []),
        (["Unreleased", VERSION], [f"CHANGELOG.md has changes since {VERSION}, the version that is built: raise"]),
        (["0.0.1"], ["CHANGELOG.md's newest section is 0.0.1, built is"]),
        ([], ["CHANGELOG.md has no section"]),
    ],
)
def test_the_changelog_and_the_version_agree(headings, faults, tmp_path, monkeypatch):
    (tmp_path / "upipe_integrations").mkdir()
    (tmp_path / "upipe_integrations" / "__init__.py").write_text(f'__version__ = "{VERSION}"\n')
    (tmp_path / "CHANGELOG.md").write_text("".join(f"## [{heading}]\n" for heading in headings))
    monkeypatch.setattr(contents, "ROOT", tmp_path)
    said = contents._faults_of_versions({VERSION})
    assert len(said) == len(faults) and all(s.startswith(f) for s, f in zip(said, faults, strict=True))


def test_what_must_be_built_is_what_pyproject_says():
    text = (ROOT / "pyproject.toml").read_text()
    for point in contents.ENTRY_POINTS:
        name, target = point.split(" = ")
        assert f'{name} = "{target}"' in text
    assert f'version = "{VERSION}"' in text


def test_the_script_is_valid_and_says_how_it_is_used():
    script = ROOT / "scripts" / "release_check.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    result = subprocess.run([str(script), "--no-such-option"], capture_output=True, text=True)
    assert result.returncode == 2 and "--system-torch PYTHON" in result.stderr
