"""The API page has every exported name, every field with what it is, and is made of today's docstrings."""

import inspect
from pathlib import Path

import pytest

import bench
from bench.publish.__main__ import main as publish
from bench.publish.api_page import api_page, fields_of, sections

PAGE = Path(bench.__file__).with_name("API.md")


def test_the_page_that_ships_is_that_of_the_code() -> None:
    assert PAGE.read_text() == api_page(), "python -m bench.publish api --out bench/API.md writes it again"


@pytest.mark.parametrize(("name", "value"), sections())
def test_a_name_and_its_fields_say_what_they_are(name: str, value: object) -> None:
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        assert not [field for field, (_, words) in fields_of(value).items() if not words]


def test_a_page_for_a_browser(tmp_path: Path) -> None:
    assert publish(["api", "--out", str(tmp_path / "api.html")]) == 0
    page = (tmp_path / "api.html").read_text()
    assert page.startswith("<!doctype html>")
    assert all(f"<h2>{name}</h2>" in page for name in bench.__all__)
