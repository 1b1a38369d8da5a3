"""The help of the commands, as it is shown."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import atoll
from atoll.cli.main import MOVED, app

MARKUP = re.compile(r"(?<!\\)\[[a-z/][^\]]*\]")


def every_command(group: Any = None, above: str = "") -> Iterator[tuple[str, Any]]:
    """All commands by their words, those of a group too."""
    for name, command in vars(typer.main.get_command(app) if group is None else group)["commands"].items():
        if "commands" in vars(command):
            yield from every_command(command, f"{above}{name} ")
        else:
            yield f"{above}{name}", command


def test_no_help_loses_a_word_in_brackets() -> None:
    """`atoll plan --help` once said "the rest of  for a model": rich had taken [parallel] for a style."""
    assert MARKUP.search("the rest of [parallel] for")
    commands = dict(every_command())
    texts = {name: command.help for name, command in commands.items()}
    texts |= {
        f"{name} {each.name}": getattr(each, "help", None)
        for name, command in commands.items()
        for each in command.params
    }
    assert len(commands) > 10
    assert {name: text for name, text in texts.items() if MARKUP.search(text or "")} == {}


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "atoll", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith(atoll.__version__)


@pytest.mark.parametrize("word", MOVED)
def test_an_old_word_is_one_error_that_names_the_new_one(word: str) -> None:
    """Its new place is a command, and its options are those that it had."""
    result = CliRunner().invoke(app, [word, "--json"])
    assert result.exit_code == 2
    assert f"`atoll {word}` is now `atoll {MOVED[word]}`" in " ".join(result.stderr.replace("│", " ").split())
    now = " ".join(each for each in MOVED[word].split() if each.islower() and each.isalpha())
    assert now in dict(every_command())
    assert word not in dict(every_command())


def test_there_are_no_more_commands_than_can_be_remembered() -> None:
    assert len(typer.main.get_command(app).commands) <= 12  # type: ignore[attr-defined]
