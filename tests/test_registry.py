"""Families: a member is a file, found by listing, loaded by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from roundelay.algorithms import algorithms
from roundelay.collectives import collectives
from roundelay.errors import UnknownNameError
from roundelay.networks import networks
from roundelay.registry import Family

FAMILIES = [algorithms, collectives, networks]


@pytest.fixture
def garden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of our own, with one member."""
    folder = tmp_path / "garden"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "rose.py").write_text("rose = 'red'")
    (folder / "_soil.py").write_text("raise RuntimeError('nobody loads a helper')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "garden"]:
        monkeypatch.delitem(sys.modules, name)
    return folder


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.label)
def test_names_are_the_files_and_all_of_them_load(family: Family[object]) -> None:
    folder = Path(str(sys.modules[family.package].__file__)).parent
    files = sorted(path.stem for path in folder.glob("[!_]*.py"))
    assert family.names() == files
    assert list(family) == [family.load(name) for name in files]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.label)
def test_a_slip_of_the_pen_is_pointed_out(family: Family[object]) -> None:
    for name in family.names():
        with pytest.raises(UnknownNameError) as caught:
            family.load(name + "x")
        assert f"{family.label} has no '{name}x'. Did you mean '{name}'?" in str(caught.value)
        assert caught.value.known == family.names()


@pytest.mark.parametrize("name", ["", "_base", "__init__", "../errors", "a.b", "x" * 10**6, "\x1b"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.label)
def test_what_is_no_member_is_refused(family: Family[object], name: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        family.load(name)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_adding_a_member_is_adding_a_file(garden: Path) -> None:
    family: Family[str] = Family("garden")
    assert (family.label, family.names(), list(family)) == ("garden", ["rose"], ["red"])
    with pytest.raises(UnknownNameError):
        family.load("tulip")
    (garden / "tulip.py").write_text("tulip = 'yellow'")
    assert (family.names(), list(family)) == (["rose", "tulip"], ["red", "yellow"])


def test_a_member_may_be_called_after_its_file_in_another_way(garden: Path) -> None:
    (garden / "rose.py").write_text("Rose = 'a class'")
    family: Family[str] = Family("garden", public=str.capitalize)
    assert family.load("rose") == "a class"
