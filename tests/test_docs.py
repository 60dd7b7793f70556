"""The pages say what is there: links lead somewhere, commands and options exist, every file of the root has
its line."""
import re
from pathlib import Path

import pytest
from conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text()


def heading_ids(page: Path) -> set:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    """Every relative link and picture is a file of the repository, and an anchor is a heading of it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in heading_ids(file), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands(page):
    """Every script that a page runs exists, and every option that it gives stands in that script, or in one
    whose parser it borrows."""
    for script, rest in re.findall(r"python (?:-m pytest )?([\w/]+\.py)((?:[^\n`]|\\\n)*)", page.read_text()):
        assert (ROOT / script).is_file(), f"{page.name} runs {script}"
        rooms = [(ROOT / script).parent, ROOT / "cli"]
        source = "".join(file.read_text() for room in rooms for file in room.glob("*.py"))
        for option in set(re.findall(r"--[a-z][\w-]+", rest.partition("#")[0])) - {"--help"}:
            assert f'"{option}"' in source, f"{page.name} gives {script} the option {option}"


def test_readme_is_short():
    lines = README.split("\n")
    assert len(lines) <= 131 and max(map(len, lines)) <= 110


def test_every_file_has_its_line():
    """The map of files names all that lies at the root, and nothing that does not."""
    table = README[README.index("## The files"):README.index("## Read on")]
    assert {file.name for file in ROOT.glob("*.py")} <= set(re.findall(r"`(\w+\.py)`", table))
    for name in re.findall(r"^\| `([\w./]+)`", table, re.M):
        assert (ROOT / name).exists(), name
    for folder, rest in re.findall(r"^\| `(\w+/)` \| (.*)", table, re.M):
        for name in re.findall(r"`(\w+\.py)`", rest):
            assert (ROOT / folder / name).is_file(), f"{folder}{name}"


def test_the_snippet_runs(capsys, monkeypatch):
    """The Python of the README, from the clone's folder, prints an answer."""
    monkeypatch.chdir(ROOT)
    code, = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(code, {})
    assert "71" in capsys.readouterr().out


def test_the_first_command_prints_what_the_readme_says(capsys):
    """Answers, table and token-layers; seconds are another machine's."""
    import generate
    said = re.search(r"```\n(checkpoints/tiny: .*?)```", README, re.S).group(1)
    assert generate.main([]) == 0
    timeless = lambda text: re.sub(r" +\d+\.\d+ s$|, [\d.]+ times faster", "", text.strip(), flags=re.M)
    printed = timeless(capsys.readouterr().out).split("\n")
    missing = [line for line in timeless(said).split("\n") if line not in printed and line != "..."]
    assert not missing
