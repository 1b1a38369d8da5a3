"""The help of the commands, as it is shown."""

from __future__ import annotations

import re
import subprocess
import sys

import typer

import atoll
from atoll.cli.main import app

MARKUP = re.compile(r"(?<!\\)\[[a-z/][^\]]*\]")


def test_no_help_loses_a_word_in_brackets() -> None:
    """`atoll plan --help` once said "the rest of  for a model": rich had taken [parallel] for a style."""
    assert MARKUP.search("the rest of [parallel] for")
    commands = vars(typer.main.get_command(app))["commands"]
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
